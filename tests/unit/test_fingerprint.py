# extra: template
"""The fingerprint of the training state: what it sees, and that it does not depend on how it is computed."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from utils.training import fingerprint
from utils.training.fingerprint import NUM_KEYS, fingerprint_on_device, fingerprint_tensors, fingerprint_weights


def of(*tensors):
    return fingerprint_tensors("test", tensors)


@pytest.mark.guarantee("fingerprint", "divergence")
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.complex64, torch.complex128],
)
def test_one_flipped_bit_anywhere_is_seen(dtype):
    torch.manual_seed(0)
    values = torch.randint(0, 256, (6 * torch.empty(0, dtype=dtype).element_size(),), dtype=torch.uint8)
    tensors, seen = [torch.randn(7), values.view(dtype).reshape(3, 2), torch.tensor(True)], set()
    before = of(*tensors)
    assert of(*[tensor.clone() for tensor in tensors]) == before
    for byte in range(len(values)):
        for bit in range(8):
            values[byte] ^= 1 << bit
            seen.add(of(*tensors))
            values[byte] ^= 1 << bit
    assert len(seen) == 8 * len(values) and before not in seen and of(*tensors) == before


def test_the_digest_on_the_device_is_the_fingerprint_of_the_values():
    tensor, cpu = torch.randn(7, 5).t(), torch.device("cpu")
    digest = fingerprint_on_device("test", [tensor], cpu)
    assert digest.shape == () and digest.item() == of(tensor) == fingerprint_on_device(
        "test", [tensor.contiguous()], cpu
    )
    assert fingerprint_on_device("test", [torch.empty(0)], cpu) == 0


@pytest.mark.guarantee("fingerprint")
def test_exchanged_values_tensors_and_signs_are_seen():
    a, b = torch.randn(4, 5), torch.randn(4, 5)
    swapped = a.clone()
    swapped[0, 0], swapped[3, 4] = a[3, 4], a[0, 0]
    signs = a.clone()
    signs[1], signs[2] = -a[1], -a[2]
    far = torch.randn(NUM_KEYS + 9)  # the keys of later positions are products
    other = far.clone()
    other[3], other[NUM_KEYS + 3] = far[NUM_KEYS + 3], far[3]
    fingerprints = [of(a, b), of(b, a), of(swapped, b), of(signs, b), of(a.T, b), of(far), of(other)]
    assert len({*fingerprints}) == len(fingerprints)
    assert fingerprint_tensors("weights", [a]) != fingerprint_tensors("buffers", [a])


@pytest.mark.guarantee("fingerprint")
def test_chunks_and_memory_formats_change_nothing():
    torch.manual_seed(0)
    image, half, long = torch.randn(8, 3, 5, 5), torch.randn(9, 3).bfloat16(), torch.randn(NUM_KEYS + 1000)
    tensors = [torch.empty(0, 3), image, half, torch.tensor(3), long]
    with mock.patch.dict(fingerprint.CHUNK_SIZES, cpu=2**20):
        whole = of(*tensors)
    small = of(*tensors[:4])
    with mock.patch.dict(fingerprint.CHUNK_SIZES, cpu=64):
        assert of(*tensors[:4]) == small
    tensors[1:3] = image.contiguous(memory_format=torch.channels_last), half.T.contiguous().T
    assert of(*tensors) == whole and of(*tensors[:4]) == small


class LargestResult(TorchDispatchMode):
    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        memory = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in memory:  # no view
            self.bytes = max(self.bytes, result.untyped_storage().nbytes())
        return result


@pytest.mark.guarantee("fingerprint")
@pytest.mark.parametrize("chunk", [fingerprint.CHUNK_SIZES["cpu"], NUM_KEYS])
def test_no_temporary_is_larger_than_a_chunk(chunk):
    of(torch.ones(1))  # creates the keys
    tensors = [torch.ones(3, 2_000_000), torch.ones(1000, 6_000).T, torch.ones(100, dtype=torch.float64)]
    with mock.patch.dict(fingerprint.CHUNK_SIZES, cpu=chunk), LargestResult() as largest:
        of(*tensors)
    assert largest.bytes == 8 * chunk < 4 * min(tensor.numel() for tensor in tensors[:2])


@pytest.mark.guarantee("fingerprint")
def test_weights_and_state_of_the_optimizer_count_and_the_order_of_groups_does_not():
    torch.manual_seed(0)
    net = nn.Linear(3, 2)

    def trained(*groups):
        torch.manual_seed(1)
        net.reset_parameters()
        optimizer = torch.optim.AdamW([{"params": list(group)} for group in groups])
        optimizer.zero_grad()
        net(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        return SimpleNamespace(model=net, parameters_by_tensor={p: p for p in net.parameters()}, optimizer=optimizer)

    before = int(fingerprint_weights(trained([net.bias], [net.weight])))
    state = trained([net.weight, net.bias])
    assert int(fingerprint_weights(state)) == before
    fingerprints = set()
    for tensor in (net.weight, *state.optimizer.state[net.bias].values()):
        flat = tensor.detach().view(-1).view(torch.int32)
        flat[0] ^= 1
        fingerprints.add(int(fingerprint_weights(state)))
        flat[0] ^= 1
    assert len(fingerprints) == 4 and before not in fingerprints
