# extra: launcher
"""Decide what to start on this node: check launch.sh's flags and variables, and build torchrun's command line."""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from config import TrainingConfig
from scripts.lib.launching.rendezvous import ROUTE_PATIENCE_S, Nodes, Wait
from scripts.lib.network import (
    check_interfaces,
    explain_connection_error,
    find_interface,
    find_local_address,
    has_ipv4_loopback,
    is_loopback,
    resolve,
)
from utils.cpus import count_usable_cpus
from utils.settings.errors import UserError
from utils.signals import STOP_SIGNALS

SIGNALS = (*STOP_SIGNALS, signal.SIGQUIT)
GPU_DRIVERS = (Path("/dev/kfd"), Path("/dev/nvidiactl"))  # AMD has no nvidia-smi, nor has NVIDIA in a small container
DESCRIPTION = """\
Start train.py on this node. Run it on each node of the job, with train.py's flags and the ones below, or once with
--hosts. Variables such as NNODES can be set in the environment instead of by flag.

One node uses a private port. With several nodes, NODE_RANK selects static rendezvous, and MAX_RESTARTS or
NNODES=MIN:MAX selects torchrun's c10d. All ports are unauthenticated, so keep them on a private network.
SIGTERM, SIGINT and SIGUSR1 save and stop the run. A second SIGINT kills it.
Exit codes: 0 completed, 1 failed, 2 rejected, 75 preempted and saved (start it again)."""
FLAGS = {  # default and help by name (the variable is the name in upper case, or listed in VARIABLES)
    "nnodes": ("1", "number of nodes, or MIN:MAX"),
    "nproc-per-node": ("", "processes on this node [number of GPUs, or 1]"),
    "node-rank": ("", "number of this node, 0 to NNODES - 1"),
    "master-addr": ("", "name or address of node 0, as the other nodes see it"),
    "master-port": ("29500", "a free port on node 0 [29500]"),
    "max-restarts": ("0", "restarts by torchrun (c10d) [0]"),
    "rdzv-backend": ("", "static or c10d [derived from the other flags]"),
    "retries": ("0", "how often to relaunch after a failure or preemption [0]"),
    "wait": ("", "seconds to wait for the other nodes [900, or 15 if the name or route does not exist]"),
}
VARIABLES = {"retries": "LAUNCH_RETRIES", "wait": "LAUNCH_WAIT"}
SWITCHES = {
    "preflight": "check the nodes instead of training (scripts/preflight.py)",  # extra: preflight
    "debug": "record collectives into the run folder",
    "detach": "run in the background, even after the terminal closes",
    "dry-run": "print the command without running it",
}
TRAINING_PROGRAM = ["train.py"]
DEBUG_VARIABLES = {  # these turn on verbose logs and the flight recorder
    "TORCH_DISTRIBUTED_DEBUG": "INFO",  # DETAIL segfaults under DDP with gloo (torch 2.15.0)
    "TORCH_CPP_LOG_LEVEL": "INFO",
    "NCCL_DEBUG": "INFO",
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_FR_DUMP_ON_TIMEOUT": "1",
}


@dataclass(frozen=True)
class LaunchPlan:
    """The command that launch.sh starts, with its environment."""

    command: list[str]
    settings: dict[str, str]  # values for environment variables that the user has not set
    nodes: Nodes
    run_folder: Path
    retries: int
    patience: int  # seconds to wait for other nodes (0: the default)
    is_training: bool  # otherwise launch.sh exits with torchrun's exit code


def create_parser(env: dict[str, str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/launch.sh",
        usage="%(prog)s [flags of launch.sh] [flags of train.py]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
        allow_abbrev=False,
        exit_on_error=False,
    )
    for name, (default, text) in FLAGS.items():
        variable = VARIABLES.get(name, name.replace("-", "_").upper())
        parser.add_argument(f"--{name}", metavar=variable, default=env.get(variable) or default, help=text)
        if "-" in name:
            parser.add_argument(f"--{name.replace('-', '_')}", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    text = "run launch.sh on these hosts over ssh, in this directory and with these variables (the first is node 0)"
    parser.add_argument("--hosts", metavar="HOST,HOST", default="", help=text)
    parser.add_argument(  # extra: benchmark
        "--scaling", metavar="FILE.json", default="", help="measure instead of training (scripts/benchmark.py --json)"
    )
    for name, text in SWITCHES.items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    return parser


def read_flags(argv: list[str], env: dict[str, str]) -> tuple[argparse.Namespace, list[str]]:
    """Split the arguments into launch.sh's flags and train.py's. Raises UserError."""
    try:
        return create_parser(env).parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise UserError(f"The flags of launch.sh cannot be read ({error}). Give --help to see them.") from None


def parse_integer(name: str, text: str, low: int) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < low:
        raise UserError(f"{name} must be an integer of at least {low}, got {text}.")
    return int(text)


def parse_port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1024 <= int(text) <= 65535:
        raise UserError(f"MASTER_PORT must be a port from 1024 to 65535, got {text}.")
    return int(text)


def read_nodes(options: argparse.Namespace) -> Nodes:
    """Read the number of nodes and the place of this one. Raises UserError if the numbers contradict each other."""
    low, colon, high = options.nnodes.partition(":")
    least = parse_integer("NNODES", low, 1)
    most = parse_integer("NNODES", high, least) if colon else least
    restarts = parse_integer("MAX_RESTARTS", options.max_restarts, 0)
    is_elastic = bool(restarts) or least < most
    backend = options.rdzv_backend or ("c10d" if is_elastic else "static")
    if backend not in ("static", "c10d"):
        raise UserError(f"RDZV_BACKEND must be static or c10d, got {backend}.")
    rank = parse_integer("NODE_RANK", options.node_rank, 0) if options.node_rank else -1
    if rank >= most:
        raise UserError(f"NODE_RANK must be from 0 to {most - 1}, since NNODES is {options.nnodes}, got {rank}.")
    if most > 1 and backend == "static":
        if rank < 0:
            text = f"NODE_RANK must be set, since NNODES is {options.nnodes}."
            raise UserError(f"{text} Give each node its own number from 0 to {most - 1}.")
        if is_elastic:
            variable = f"MAX_RESTARTS={restarts}" if restarts else f"NNODES={options.nnodes}"
            text = f"{variable} does not work with RDZV_BACKEND=static, since static rendezvous hangs on a restart."
            raise UserError(f"{text} Unset RDZV_BACKEND, or use --retries instead.")
    if most > 1 and not options.master_addr:
        text = f"MASTER_ADDR must be set, since NNODES is {options.nnodes}."
        raise UserError(f"{text} Give the name or address of node 0.")
    port = parse_port(options.master_port)
    return Nodes(least, most, rank, options.master_addr, port, backend)


def count_gpus(env: dict[str, str]) -> int:
    """Return the number of GPUs that a process started here would see, without initializing CUDA here."""
    if "CUDA_VISIBLE_DEVICES" in env:
        listed = [word.strip() for word in env["CUDA_VISIBLE_DEVICES"].split(",") if word.strip()]
        return listed.index("-1") if "-1" in listed else len(listed)
    command = ["nvidia-smi", "-L"]
    if not shutil.which(command[0]) and any(path.exists() for path in GPU_DRIVERS):  # importing torch takes seconds
        command = [sys.executable, "-c", "import torch; print('GPU \\n' * torch.cuda.device_count())"]
    with suppress(OSError, subprocess.TimeoutExpired):
        completed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        return sum(line.startswith("GPU ") for line in completed.stdout.splitlines())
    return 0


def find_node_address(nodes: Nodes, patience: float) -> tuple[str, bool]:
    """Return this node's address on the route to node 0, and whether it is node 0. Raises UserError."""
    host, wait, given = socket.gethostname(), Wait(), f"MASTER_ADDR={nodes.address}"
    fix = "Give the address of node 0, or add the name to DNS or /etc/hosts."
    while True:
        try:
            addresses = resolve(nodes.address)
            break
        except OSError as error:
            if wait.seconds >= patience:
                text = f"{host} could not resolve {given} within {wait.seconds:.0f} s ({error.strerror})."
                raise UserError(f"{text} {fix}") from None
            wait.print_missing(f"The name {nodes.address} cannot be resolved yet. {fix}")
            time.sleep(1)
    routable = [address for address in addresses if not is_loopback(address)]
    if not routable:
        text = f"{given} is {addresses[0]} on {host}, which the other nodes cannot reach."
        fix = "Give the address of node 0 in the shared network, or correct /etc/hosts (Debian maps the name of a host"
        fix += " to 127.0.1.1)."
        raise UserError(f"{text} {fix}")
    try:
        local_address = find_local_address(routable[0])
    except OSError as error:
        text = f"{host} has no route to {given} ({explain_connection_error(error)})."
        raise UserError(f"{text} Check the address and the routes.") from None
    return local_address, nodes.rank == 0 if nodes.backend == "static" else local_address in addresses


def launch_folder(config: TrainingConfig) -> Path:
    """Return the folder of torchrun's output."""
    return config.run_folder.with_name(f"{config.run_folder.name}.launch")


def choose_program(options: argparse.Namespace) -> list[str]:
    """Return the program that torchrun starts, with its own options."""
    if options.preflight:  # extra: preflight
        return ["scripts/preflight.py"]
    if options.scaling:  # extra: benchmark
        return ["scripts/benchmark.py", "--json", options.scaling]
    return TRAINING_PROGRAM


def create_launch_plan(
    options: argparse.Namespace, flags: list[str], config: TrainingConfig, env: dict[str, str]
) -> LaunchPlan:
    """Build the plan of a launch from flags and variables. Raises UserError."""
    nodes, host = read_nodes(options), socket.gethostname()
    patience = parse_integer("LAUNCH_WAIT", options.wait, 1) if options.wait else 0
    retries = parse_integer("LAUNCH_RETRIES", options.retries, 0)
    if not importlib.util.find_spec("torch") or not shutil.which("torchrun"):
        text = f"This Python ({sys.executable}) has no torchrun, since torch is not installed there."
        raise UserError(f"{text} Activate the environment that has torch (source .venv/bin/activate).")
    gpus = count_gpus(env) if config.backend in ("auto", "nccl") else 0
    processes = parse_integer("NPROC_PER_NODE", options.nproc_per_node, 1) if options.nproc_per_node else gpus or 1
    # nohup and a Slurm job ignore some of them
    signal_names = [number.name for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    settings = {
        "OMP_NUM_THREADS": str(max(1, count_usable_cpus() // processes)),
        "PYTHONUNBUFFERED": "1",
        "TORCH_GLOO_LAZY_INIT": "1",  # gloo opens fewer sockets
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # each restart gets a fresh store
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": f"[{host} ${{rank}}] ",
        "PET_SIGNALS_TO_HANDLE": ",".join(signal_names),  # older versions of torchrun ignore variables PET_*
        "PET_SHUTDOWN_TIMEOUT": "300",  # a large save takes long
    }
    check_interfaces(env)
    words = ["torchrun", f"--nproc-per-node={processes}"]
    if nodes.max_nodes == 1 and has_ipv4_loopback():
        words += ["--standalone"]
    elif nodes.max_nodes == 1:
        # --standalone meets at the names localhost and of the host, and gloo falls back to 127.0.0.1
        words += ["--rdzv-backend=c10d", "--rdzv-endpoint=[::1]:0", f"--rdzv-id={uuid.uuid4()}", "--local-addr=::1"]
        if interface := find_interface("::1"):
            settings["GLOO_SOCKET_IFNAME"] = interface
    else:
        local_address, is_host = find_node_address(nodes, patience or ROUTE_PATIENCE_S)
        nodes = replace(nodes, is_host=is_host, run=config.run_folder.name)
        if interface := find_interface(local_address):
            settings |= {"NCCL_SOCKET_IFNAME": f"={interface}", "GLOO_SOCKET_IFNAME": interface}
        words += [f"--nnodes={nodes.nnodes}", f"--local-addr={local_address}"]
        if nodes.backend == "static":
            words += [f"--node-rank={nodes.rank}", f"--master-addr={nodes.address}", f"--master-port={nodes.port}"]
        else:
            words += ["--rdzv-backend=c10d", f"--rdzv-endpoint={nodes.address}:{nodes.port}"]
            words += [f"--rdzv-conf=is_host={int(is_host)}"]
        # otherwise two launches at the same time would share torchrun's keys
        words += [f"--rdzv-id={env.get('LAUNCH_ID') or nodes.run}"]
    if int(options.max_restarts):
        words += [f"--max-restarts={options.max_restarts}"]
    if options.debug:
        settings |= DEBUG_VARIABLES | {"TORCH_FR_DUMP_TEMP_FILE": str(config.run_folder / "traces" / f"flight-{host}-")}
    words += [f"--log-dir={launch_folder(config) / host}", "--tee=3"]
    program = choose_program(options)
    return LaunchPlan(
        command=[*words, *program, *flags],
        settings={name: value for name, value in settings.items() if name not in env},
        nodes=nodes,
        run_folder=config.run_folder,
        retries=retries,
        patience=patience,
        is_training=program == TRAINING_PROGRAM,
    )
