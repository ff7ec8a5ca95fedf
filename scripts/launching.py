"""What launch.sh knows and checks before it starts torchrun, while it runs, and at its end. Standard library only: it
answers at once.

launching.py plan [flags of launch.sh and train.py]   shell text with what launch.sh needs; exit code 2 and a sentence
where it cannot be
launching.py meet FILE                                wait until all nodes are there (variables of the plan); the
launch's id
launching.py pass_on PID                              ask the ranks of a torchrun to save and stop
launching.py watch PID                                end a torchrun whose ranks are gone while it stays
launching.py judge CODE                               the contract's exit code, and the first failure as the last line
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from config import TrainingConfig, UserError
from scripts import meeting
from scripts.network import check_interfaces, interface_of, is_loopback, own_address_to, resolve, why
from utils.files import replace_json

# of an agent whose peer is gone; under c10d it may be waiting for a new one
SECONDS_WITHOUT_RANKS = {
    "static": 30,
    "c10d": 120,
}
SECONDS_TO_END = 10
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGHUP)
SECONDS_OF_PATIENCE = 900  # for other nodes: a large image is pulled, an earlier attempt ends


@dataclass(frozen=True)
class Nodes:
    """Who takes part."""

    least: int
    most: int
    rank: int  # -1: not given
    address: str
    port: int
    backend: str  # static or c10d; with one node torchrun's own


FLAGS = {  # name: the variable of the same meaning, its default, and what it is
    "nnodes": ("NNODES", "1", "nodes in all, or MIN:MAX"),
    "nproc-per-node": ("NPROC_PER_NODE", "", "processes on this node (its GPUs, else 1)"),
    "node-rank": ("NODE_RANK", "", "this node, from 0 to NNODES - 1"),
    "master-addr": ("MASTER_ADDR", "", "name or address of node 0, as the other nodes see it"),
    "master-port": ("MASTER_PORT", "29500", "a free port of node 0"),
    "max-restarts": ("MAX_RESTARTS", "0", "restarts by torchrun itself (c10d)"),
    "rdzv-backend": ("RDZV_BACKEND", "", "static, or c10d: follows from the others"),
    "retries": ("LAUNCH_RETRIES", "0", "times that a launch which failed or was preempted is started anew"),
    "patience": (
        "LAUNCH_PATIENCE",
        "",
        "seconds to wait for the other nodes (900; 15 for a name or route that is not there)",
    ),
}


def read_flags(argv: list[str], env: dict[str, str]) -> tuple[argparse.Namespace, list[str]]:
    """Launch.sh's own flags, with the variables of the environment as defaults, and what is left for train.py."""
    parser = argparse.ArgumentParser(prog="launch.sh", add_help=False, allow_abbrev=False)
    for name, (variable, default, _) in FLAGS.items():
        parser.add_argument(f"--{name}", f"--{name.replace('-', '_')}", default=env.get(variable, "") or default)
    for name in ("dry-run", "detach", "debug", "preflight"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--scaling", default="")
    parser.error = lambda message: (_ for _ in ()).throw(UserError(f"{message}; give --help for the flags"))
    return parser.parse_known_args(argv)


def whole(name: str, text: str, low: int) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < low:
        raise UserError(f"{name}={text}: is no whole number of at least {low}; give one")
    return int(text)


def read_nodes(options: argparse.Namespace) -> Nodes:
    """Raises UserError where the numbers do not fit together."""
    low, colon, high = options.nnodes.partition(":")
    least = whole("NNODES", low, 1)
    most = whole("NNODES", high, least) if colon else least
    restarts, rank = whole("MAX_RESTARTS", options.max_restarts, 0), -1
    backend = options.rdzv_backend or ("c10d" if restarts or least < most else "static")
    if backend not in ("static", "c10d"):
        raise UserError(f"RDZV_BACKEND={backend}: is not known; give static or c10d, or leave it out")
    if most > 1 and backend == "static" and not options.node_rank:
        raise UserError(
            f"NODE_RANK: is not set, with NNODES={options.nnodes}; give this node its number, 0 to {most - 1}"
        )
    if options.node_rank:
        rank = whole("NODE_RANK", options.node_rank, 0)
        if rank >= most:
            raise UserError(f"NODE_RANK={rank}: is outside NNODES={options.nnodes}; give 0 to {most - 1}")
    if most > 1 and backend == "static" and (restarts or least < most):
        what = f"MAX_RESTARTS={restarts}" if restarts else f"NNODES={options.nnodes}"
        raise UserError(
            f"{what}: static rendezvous hangs at a restart; leave RDZV_BACKEND out (c10d), or give --retries"
        )
    if most > 1 and not options.master_addr:
        raise UserError(f"MASTER_ADDR: is not set, with NNODES={options.nnodes}; give the name or address of node 0")
    port = whole("MASTER_PORT", options.master_port, 1)
    if port > 65535:
        raise UserError(f"MASTER_PORT={port}: is no port; give one from 1024 to 65535")
    return Nodes(least, most, rank, options.master_addr, port, backend)


def count_gpus(env: dict[str, str]) -> int:
    """The GPUs that a process started here would see, without asking CUDA."""
    if "CUDA_VISIBLE_DEVICES" in env:
        listed = [word.strip() for word in env["CUDA_VISIBLE_DEVICES"].split(",") if word.strip()]
        return listed.index("-1") if "-1" in listed else len(listed)
    with suppress(OSError, subprocess.TimeoutExpired):
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=False)
        return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    return 0


def torchrun_has(flag: str) -> bool:
    """Whether this torch's torchrun knows a flag; its source is read, since importing torch takes seconds."""
    found = importlib.util.find_spec("torch")
    source = Path(found.origin).parent / "distributed" / "run.py" if found and found.origin else None
    if not source or not source.exists() or not shutil.which("torchrun"):
        raise UserError(
            "torchrun: this Python has no torch; activate the environment that has it (source .venv/bin/activate)"
        )
    return f'"{flag}"' in source.read_text(encoding="utf-8")


def route_to_master(nodes: Nodes, seconds: float) -> tuple[str, bool]:
    """This node's address on the route to node 0, and whether it is node 0 itself. Raises UserError."""
    host, began, next_line = socket.gethostname(), time.monotonic(), 1.0
    while True:
        try:
            found = resolve(nodes.address)
            break
        except OSError as error:
            waited = time.monotonic() - began
            if waited >= seconds:
                text = f"{host} cannot resolve this name in {waited:.0f} s ({error.strerror})"
                raise UserError(
                    f"MASTER_ADDR={nodes.address}: {text}; give node 0's address, or put its name into DNS or"
                    " /etc/hosts"
                ) from None
            if waited >= next_line:
                next_line += meeting.SECONDS_BETWEEN_LINES
                meeting.say(f"waiting for the name {nodes.address} to resolve ({waited:.0f} s)")
            time.sleep(min(1.0, seconds))
    if all(is_loopback(address) for address in found):
        text = f"is {found[0]} on {host}, which the other nodes cannot reach"
        remedy = (
            "give node 0's address in the network that they share, or mend /etc/hosts (Debian puts the own name at"
            " 127.0.1.1)"
        )
        raise UserError(f"MASTER_ADDR={nodes.address}: {text}; {remedy}")
    try:
        own = own_address_to(next(address for address in found if not is_loopback(address)))
    except OSError as error:
        raise UserError(
            f"MASTER_ADDR={nodes.address}: {host} has no way to it ({why(error)}); check the address and the routes"
        ) from None
    return own, nodes.rank == 0 if nodes.backend == "static" else own in found


def rendezvous(nodes: Nodes, is_host: bool, job: str) -> list[str]:
    """Torchrun's flags for how several nodes meet."""
    if nodes.backend == "static":
        return [f"--node-rank={nodes.rank}", f"--master-addr={nodes.address}", f"--master-port={nodes.port}"]
    where = [f"--rdzv-endpoint={nodes.address}:{nodes.port}", f"--rdzv-conf=is_host={int(is_host)}"]
    return ["--rdzv-backend=c10d", *where, f"--rdzv-id={job}"]


def debugging(dump: str) -> dict[str, str]:
    """Variables for verbose logs and the flight recorder, by its old and its new names; dump: how its files' paths
    begin."""
    return {
        "TORCH_DISTRIBUTED_DEBUG": "INFO",  # DETAIL ends in a segmentation fault under DDP with gloo (torch 2.15.0)
        "TORCH_CPP_LOG_LEVEL": "INFO",
        "NCCL_DEBUG": "INFO",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": dump,
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": dump,
    }


def plan(argv: list[str], env: dict[str, str]) -> str:
    """Shell text for launch.sh. Raises UserError."""
    options, flags = read_flags(argv, env)
    if "--print-config" in flags:
        return shlex.join(["exec", "python3", "train.py", *flags])
    nodes = read_nodes(options)
    if options.patience:
        whole("LAUNCH_PATIENCE", options.patience, 1)
    config = TrainingConfig.from_args(flags)
    status = read_json(config.run_folder / "status.json")
    if (
        nodes.most > 1
        and config.resume_from == "auto"
        and status.get("state") == "completed"
        and not (options.preflight or options.scaling)
    ):
        # the other nodes may be gone for good
        meeting.say(f"{config.run_folder}: this run is completed, nothing is left to do")
        return "exit 0"
    retries = whole("LAUNCH_RETRIES", options.retries, 0)
    gpus = count_gpus(env) if config.backend in ("auto", "nccl") else 0
    processes = whole("NPROC_PER_NODE", options.nproc_per_node, 1) if options.nproc_per_node else gpus or 1
    host = socket.gethostname()
    if 0 < gpus < processes:
        raise UserError(
            f"NPROC_PER_NODE={processes}: {host} shows {gpus} GPU(s); give at most {gpus}, or --backend gloo"
        )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    settings = {
        "OMP_NUM_THREADS": str(max(1, cores // processes)),
        "PYTHONUNBUFFERED": "1",  # what a rank prints comes out at once
        "TORCH_GLOO_LAZY_INIT": "1",  # fewer sockets
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # a fresh store for each restart
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": f"[{host} ${{rank}}] ",
    }
    logs = config.run_folder.with_name(f"{config.run_folder.name}.launch")
    words, is_host = ["torchrun", f"--nproc-per-node={processes}"], False
    if nodes.most == 1:
        words += ["--standalone"]
    else:
        check_interfaces(env)
        own, is_host = route_to_master(nodes, float(options.patience or meeting.SECONDS_FOR_A_ROUTE))
        if interface := interface_of(own):
            settings |= {"NCCL_SOCKET_IFNAME": f"={interface}", "GLOO_SOCKET_IFNAME": interface}
        words += [
            f"--nnodes={options.nnodes}",
            f"--local-addr={own}",
            *rendezvous(nodes, is_host, env.get("LAUNCH_ID") or "launch"),
        ]
    if int(options.max_restarts):
        words += [f"--max-restarts={options.max_restarts}"]
    if torchrun_has("--signals-to-handle"):
        # nohup, and Slurm's script
        hears = [number.name for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        words += [f"--signals-to-handle={','.join(hears)}"]
    if torchrun_has("--shutdown-timeout"):
        words += ["--shutdown-timeout=300"]  # a large save takes its time
    words += [f"--log-dir={logs / host}", "--tee=3"]
    try:
        if not options.dry_run:
            (logs / host).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        text = f"{host} cannot write beside it ({error.strerror})"
        raise UserError(f"run_dir={config.run_folder}: {text}; mount it there for writing, or give another") from None
    if options.debug:
        settings |= debugging(str(config.run_folder / "traces" / f"flight-{host}-"))
    program = ["scripts/preflight.py" if options.preflight else "train.py"]
    if options.scaling:
        program = [
            "scripts/scaling.py",
            "--json",
            options.scaling,
            "--plot",
            f"{options.scaling.removesuffix('.json')}.svg",
        ]
    words += [*program, *flags]
    settings = {name: value for name, value in settings.items() if name not in env}
    own_names = {
        "RUN_DIR": str(config.run_folder),
        "LOGS": str(logs),
        "RETRIES": str(retries),
        "MEETING": (
            json.dumps(vars(nodes) | {"is_host": is_host, "patience": options.patience}) if nodes.most > 1 else ""
        ),
    }
    is_asked = {name: "1" if getattr(options, name) else "" for name in ("dry_run", "detach", "preflight")}
    # no run: torchrun's exit code is that of launch.sh
    is_asked["preflight"] = is_asked["preflight"] or (options.scaling and "1")
    lines = [f"export {name}={shlex.quote(value)}" for name, value in settings.items()]
    lines += [f"PLAN_{name.upper()}={shlex.quote(value)}" for name, value in (own_names | is_asked).items()]
    lines += [
        f"command=({shlex.join(words)})",
        f"said={shlex.quote(shlex.join(f'{k}={v}' for k, v in settings.items()))}",
    ]
    return "\n".join(lines)


def meet(env: dict[str, str]) -> str:
    """Wait until all nodes are there. Returns the launch's id, node 0's. Raises UserError and NotCome."""
    nodes = json.loads(env["PLAN_MEETING"])
    seconds = float(nodes["patience"] or SECONDS_OF_PATIENCE)
    if nodes["is_host"]:
        return meeting.host(nodes, seconds, env["LAUNCH_ID"])
    is_first = env.get("PLAN_ATTEMPT", "1") == "1"  # later node 0 may be on its way back
    return meeting.join(
        nodes, seconds, seconds if nodes["patience"] or not is_first else meeting.SECONDS_FOR_A_ROUTE, env["LAUNCH_ID"]
    )


def children_of(pid: int) -> list[int]:
    """The living child processes; none where there is no /proc."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent = file.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == pid and state != "Z":
                found.append(int(file.parent.name))
    return found


def pass_on(pid: int) -> None:
    """Ask the ranks to save and stop; torchrun then ends by itself, without a time limit. Before there are ranks:
    torchrun."""
    for process in children_of(pid) or [pid]:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGTERM)


def watch(pid: int, env: dict[str, str]) -> None:
    """End torchrun when its ranks are gone and it stays: its peer is lost, and its store with it."""
    seconds = SECONDS_WITHOUT_RANKS[json.loads(env["PLAN_MEETING"])["backend"]]
    seen, had_ranks = time.monotonic(), False
    while Path(f"/proc/{pid}").exists():
        if children_of(pid):
            seen, had_ranks = time.monotonic(), True
        if had_ranks and time.monotonic() - seen > seconds:
            meeting.say(
                f"torchrun stays although its ranks ended {seconds} s ago: the other nodes are gone; it is ended"
            )
            for number in (signal.SIGTERM, signal.SIGKILL):
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
                time.sleep(SECONDS_TO_END)
            return
        time.sleep(1)


def judge(code: int, env: dict[str, str]) -> int:
    """The contract's exit code of this attempt. Of a failed one the first failure is said last, after all that followed
    it."""
    file = Path(env["PLAN_RUN_DIR"], "status.json")
    error, text = read_json(Path(env["TORCHELASTIC_ERROR_FILE"])), _read(file)
    status = json.loads(text) if text and text != env["STATUS_BEFORE"] else {}
    message = error.get("message", "")
    message = message.get("message", "") if isinstance(message, dict) else str(message)
    if message.startswith("UserError: "):
        return 2
    if status.get("state") == "preempted":
        return 75
    if code == 0:
        return 0
    if status.get("state") == "running" and not env["PLAN_MEETING"]:  # no rank was left to say it
        cause = message or f"every rank was killed or cut off (torchrun ended with {code})"
        status |= {"state": "failed", "error": cause, "rank": 0, "host": socket.gethostname()}
        with suppress(OSError):
            replace_json(file, status)
    if status.get("state") == "failed":
        print(f"launch.sh: failed: rank {status['rank']} on {status['host']}: {status['error']}", file=sys.stderr)
    return 1


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def read_json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(_read(file) or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def main() -> int:
    task, words, env = sys.argv[1], sys.argv[2:], dict(os.environ)
    try:
        if task == "plan":
            print(plan(words, env))
        elif task == "meet":
            Path(words[0]).write_text(meet(env))
        elif task == "pass_on":
            pass_on(int(words[0]))
        elif task == "watch":
            watch(int(words[0]), env)
        elif task == "judge":
            return judge(int(words[0]), env)
        elif task == "help":
            print("\n".join(f"  --{name:15} {variable:17} {text}" for name, (variable, _, text) in FLAGS.items()))
    except UserError as refused:
        host, text = socket.gethostname(), str(refused)
        meeting.say(text if host in text else f"{host}: {text}")
        return 2
    except meeting.NotCome as late:
        meeting.say(str(late))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
