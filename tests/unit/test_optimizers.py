"""An optimizer of any package continues from a checkpoint as if it had not been stopped."""

import io
import warnings

import pytest
import torch
from torch import nn

from config import TrainingConfig
from ddp_utils import cleanup_distributed, setup_distributed
from ranks import slow
from test_state import FLOAT32, step
from utils.data.sampler import Assignment, GlobalBatchSampler
from utils.settings.errors import UserError
from utils.training.hooks import ModelHooks
from utils.training.state import TrainState


@pytest.fixture(scope="module", autouse=True)
def world_of_one():
    setup_distributed(TrainingConfig(backend="gloo"))
    yield
    cleanup_distributed()


def two_groups(net):
    """The weights of the linear layers, and all other parameters."""
    matrices = [p for p in net.parameters() if p.ndim > 1]
    return [{"params": matrices}, {"params": [p for p in net.parameters() if p.ndim == 1], "weight_decay": 0.0}]


def make(create, groups=two_groups, dtype=torch.float32):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)).to(dtype)
    hooks = ModelHooks(
        create_model=None,
        compute_loss=None,
        param_groups=lambda net, config: groups(net),
        create_optimizer=lambda groups, config: create(groups),
    )
    state = TrainState(net, hooks, TrainingConfig(warmup_epochs=0, lr=0.01), FLOAT32)
    state.allocate_metrics({"loss": (0.0, 4)})
    state.plan_schedule(
        GlobalBatchSampler(range(40), batch_size=4, micro_batches_per_step=1, assignment=Assignment(0, 1))
    )
    return state


def train_steps(state, numbers):
    for number in numbers:
        torch.manual_seed(number)
        step(state)
    return state


def saved(state):
    """The state as a checkpoint file gives it back."""
    file = io.BytesIO()
    torch.save(state.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resumed(create, payload, groups=two_groups):
    state = make(create, groups)
    state.load_state_dict(payload)
    return state


def is_same_after_a_resume(create):
    """Whether 3 steps, a resume and 3 more steps give the weights of 6 steps."""
    whole = train_steps(make(create), range(6)).model.state_dict()
    again = train_steps(resumed(create, saved(train_steps(make(create), range(3)))), range(3, 6)).model.state_dict()
    return all(torch.equal(whole[name], again[name]) for name in whole)


class Counting(torch.optim.Optimizer):
    """SGD whose rate depends on an entry of the parameter group that `advance` changes in each step."""

    def __init__(self, groups, advance, **entries):
        super().__init__(groups, {"lr": 0.01, "weight_decay": 0.0, "eps": 0.5, **entries})
        self._advance = advance

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            count = self._advance(group)
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] * float(count))


def count_number(group):
    group["count"] = group.get("count", 0) + 1
    return group["count"]


def count_in_place(group):
    group["count"].add_(1)
    return group["count"]


def count_in_a_tuple(group):
    group["counts"] = (group["counts"][0] + 1, group["counts"][1] * 2)
    return sum(group["counts"])


def count_in_a_list(group):
    group["counts"].append(len(group["counts"]))
    return sum(group["counts"])


def count_in_a_dict(group):
    group["counts"]["steps"].add_(1)
    return group["counts"]["steps"]


def set_a_flag(group):
    group["has_begun"], had_begun = True, group["has_begun"]
    return 1 if had_begun else 3


class CountsInState(Counting):
    """Keeps the count under a name of its own in the state, as MADGRAD does, and statistics of another type."""

    def __init__(self, groups):
        super().__init__(groups, self._count)

    def _count(self, group):
        self.state["count"] = self.state.get("count", torch.zeros(1)) + 1
        for p in group["params"]:
            state = self.state[p]
            state["mask"] = state.get("mask", torch.zeros_like(p, dtype=torch.bool)) ^ (p.grad > 0)
            state["rough"] = state.get("rough", torch.zeros_like(p, dtype=torch.bfloat16)) + p.grad
            p.grad.add_(state["rough"]).mul_(state["mask"])
        return self.state["count"]


class CountsBesideState(Counting):
    """Keeps its count at the top of its state dict, as Ranger21 does."""

    def __init__(self, groups):
        super().__init__(groups, self._count)
        self.count = 0

    def _count(self, group):
        self.count += 1
        return self.count

    def state_dict(self):
        return super().state_dict() | {"count": self.count}

    def load_state_dict(self, state_dict):
        self.count = state_dict["count"]
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})


SHAPES = {
    "number": lambda groups: Counting(groups, count_number),
    "tensor": lambda groups: Counting([group | {"count": torch.zeros(())} for group in groups], count_in_place),
    "tuple": lambda groups: Counting(groups, count_in_a_tuple, counts=(0, 1.5)),
    "list": lambda groups: Counting([group | {"counts": []} for group in groups], count_in_a_list),
    "dict": lambda groups: Counting(
        [group | {"counts": {"steps": torch.zeros(1)}} for group in groups], count_in_a_dict
    ),
    "flag": lambda groups: Counting(groups, set_a_flag, has_begun=False),
    "state": CountsInState,
    "beside the state": CountsBesideState,
}
TORCH = "Adafactor Adadelta Adagrad Adam Adamax AdamW ASGD NAdam RAdam RMSprop Rprop SGD".split()
TIMM = """adafactor adafactorbv adan adanw adopt cadan kron lamb lambc lambw laprop lars lion lookahead_adamw
    lookahead_adan lookahead_lamb madgrad mars muon nadamw novograd""".split()
PYTORCH_OPTIMIZER = """adabelief adafactor adan ademamix asgd avagrad came dadaptadam dadaptsgd kron lamb madgrad
    prodigy ranger schedulefreeadamw schedulefreesgd shampoo soap spam swats yogi""".split()


def create_packaged(package, name):
    if package == "timm":
        from timm.optim import create_optimizer_v2

        return lambda groups: create_optimizer_v2(groups, opt=name, lr=0.01)
    from pytorch_optimizer import load_optimizer

    return lambda groups: load_optimizer(name)(groups, lr=0.01)


@pytest.mark.guarantee("resume")
@pytest.mark.parametrize("shape", SHAPES)
def test_what_an_optimizer_keeps_in_its_groups_or_state_survives_a_resume(shape):
    assert is_same_after_a_resume(SHAPES[shape])


@pytest.mark.guarantee("resume")
@pytest.mark.parametrize("name", TORCH)
def test_optimizers_of_torch_survive_a_resume(name):
    assert is_same_after_a_resume(lambda groups: getattr(torch.optim, name)(groups, lr=0.01))


@pytest.mark.guarantee("resume")
@pytest.mark.parametrize(
    ("package", "name"),
    [slow("timm", name) for name in TIMM] + [slow("pytorch_optimizer", name) for name in PYTORCH_OPTIMIZER],
)
def test_optimizers_of_other_packages_survive_a_resume(package, name):
    pytest.importorskip(package)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert is_same_after_a_resume(create_packaged(package, name))


@pytest.mark.guarantee("changed-settings")
def test_only_what_has_changed_since_the_creation_travels():
    payload = saved(train_steps(make(SHAPES["number"]), range(2)))
    names = [["0.weight", "2.weight"], ["0.bias", "1.weight", "1.bias", "2.bias"]]
    expected = [{"names": group_names, "entries": {"count": 2}} for group_names in names]
    assert payload["optimizer"]["changed_in_groups"] == expected
    state = resumed(lambda groups: Counting(groups, count_number, eps=0.25, foreach=True), payload)
    for group in state.optimizer.param_groups:
        assert (group["count"], group["eps"], group["foreach"]) == (2, 0.25, True)


@pytest.mark.parametrize(("before", "after"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_a_fused_optimizer_goes_on_with_weights_of_another_type(before, after):
    def create(groups):
        return torch.optim.AdamW(groups, lr=0.01, fused=True)

    payload = saved(make(create, dtype=before))
    for number, p in enumerate(payload["optimizer"]["names"]):
        like = payload["model"][p]
        moments = {"exp_avg": torch.ones_like(like), "exp_avg_sq": torch.ones_like(like)}
        payload["optimizer"]["state"][number] = {"step": torch.tensor(3.0), **moments}
    state = make(create, dtype=after)
    state.load_state_dict(payload)
    for p in state.model.parameters():
        p.grad = torch.ones_like(p)
    state.optimizer.step()
    assert all(entry["exp_avg"].dtype is after for entry in state.optimizer.state.values())


def test_entries_that_are_set_at_each_start_never_travel():
    def advance(group):
        group |= {"foreach": True, "fused": True, "capturable": True, "differentiable": True}
        return 1

    payload = saved(train_steps(make(lambda groups: Counting(groups, advance)), range(1)))
    assert [entry["entries"] for entry in payload["optimizer"]["changed_in_groups"]] == [{"differentiable": True}] * 2


def by_layer(net):
    return [{"params": net[2].parameters()}, {"params": net[1].parameters()}, {"params": net[0].parameters()}]


@pytest.mark.parametrize(
    ("before", "after"),
    [(two_groups, by_layer), (by_layer, two_groups), (two_groups, lambda net: [{"params": net.parameters()}])],
)
def test_an_entry_without_a_group_is_an_error_that_names_it(before, after):
    payload = saved(train_steps(make(SHAPES["number"], before), range(2)))
    with pytest.raises(UserError, match="has 'count' for the group of .*, and no group has the same parameters now. "):
        resumed(SHAPES["number"], payload, after)


def test_groups_in_another_order_or_without_entries_may_be_divided_otherwise():
    def reverse(net):
        return two_groups(net)[::-1]

    payload = saved(train_steps(make(SHAPES["number"]), range(2)))
    assert [group["count"] for group in resumed(SHAPES["number"], payload, reverse).optimizer.param_groups] == [2, 2]
    payload = saved(train_steps(make(lambda groups: Counting(groups, lambda group: 1)), range(2)))
    resumed(SHAPES["number"], payload, by_layer)


def test_a_checkpoint_without_the_record_loads_as_before():
    payload = saved(train_steps(make(SHAPES["number"]), range(2)))
    del payload["optimizer"]["changed_in_groups"]
    state = resumed(SHAPES["number"], payload)
    assert all("count" not in group for group in state.optimizer.param_groups)


class WithoutState(Counting):
    def state_dict(self):
        return {"inner": super().state_dict()}


class WithoutRate(Counting):
    def __init__(self, groups):
        super().__init__(groups, count_number)
        for group in self.param_groups:
            del group["lr"]


def test_an_optimizer_that_cannot_be_saved_or_scheduled_is_refused_before_the_first_step():
    with pytest.raises(UserError, match="WithoutRate of create_optimizer has no 'lr' in its groups"):
        make(WithoutRate)
    with pytest.raises(
        UserError, match="WithoutState .*has no 'lr'.*or no 'state' and 'param_groups'.*. Use another optimizer."
    ):
        make(lambda groups: WithoutState(groups, count_number))
