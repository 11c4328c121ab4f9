"""The command line of the planner. It starts nothing and writes nothing."""

from __future__ import annotations

import argparse
import time

from murmuration.accounting.errors import DONE, InputError, RunError
from murmuration.accounting.escaping import escape_output
from murmuration.train.commands.arguments import add_config
from murmuration.train.commands.exit_codes import complain


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="plan.py",
        description="What a config needs on a cluster: python launch/plan.py --config ds_configs/demo.json --gpus 8 "
        "--memory 80 --tflops 150 --link 25",
        epilog="Needs neither the data nor memory for the model; data.expected_records stands in for the data.",
    )
    add_config(parser, launched=False)
    parser.add_argument(
        "--together",
        type=float,
        metavar="EPSILON",
        help="instead, for several private phases: how they best share this ε; needs no option but --config",
    )
    parser.add_argument("--gpus", type=int, metavar="N", help="number of GPUs in all")
    parser.add_argument("--memory", type=float, metavar="GIB", help="memory of one GPU")
    parser.add_argument(
        "--tflops", type=float, metavar="T",
        help="TFLOP/s that one GPU sustains in products of the config's precision: less than its data sheet says",
    )  # fmt: skip
    parser.add_argument(
        "--link", type=float, default=None, metavar="GB/S", help="GB/s from one GPU to the next; needed for several"
    )
    parser.add_argument(
        "--node-link", type=float, default=None, metavar="GB/S",
        help="the same within a node, for run.shard_over (default: --link)",
    )  # fmt: skip
    parser.add_argument("--rate", type=float, default=None, metavar="R", help="records per second of one GPU, measured")
    parser.add_argument("--noise-rate", type=float, default=None, metavar="R", help="normal numbers per second of one "
                        "rank's processor (default: measured here, now)")  # fmt: skip
    parser.add_argument("--free", type=float, default=0.1, metavar="SHARE", help="memory to leave free (default 0.1)")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    arguments = parser.parse_args(argv)
    lacking = [f"--{name}" for name in ("gpus", "memory", "tflops") if getattr(arguments, name) is None]
    if lacking and arguments.together is None:
        parser.error(f"the following arguments are required: {', '.join(lacking)}")
    return arguments


def main(argv: list[str] | None = None) -> int:
    escape_output()
    arguments = parse(argv)
    from murmuration.train.config.load import load

    try:
        if arguments.together is None and arguments.link is None and arguments.gpus > 1:
            raise InputError("--link is missing: GPUs exchange gradients; give the GB/s of the slowest link")
        if arguments.rate is not None and not arguments.rate > 0:
            raise InputError(f"--rate must be a positive number of records per second, but is {arguments.rate}")
        config = load(arguments.config, arguments.set)
    except RunError as error:
        return complain(error)
    # Heavy imports only now: bad input is refused within a second.
    from murmuration.train.distributed.process import quiet_libraries
    from murmuration.train.planner.cluster import Cluster
    from murmuration.train.planner.forecast import forecast
    from murmuration.train.planner.split import split
    from murmuration.train.planner.text import as_json, as_text

    quiet_libraries()
    try:
        if arguments.together is not None:
            found = split(config, arguments.together)
            print(found.as_json() if arguments.json else found.as_text())
            return DONE
        cluster = Cluster(
            arguments.gpus, arguments.memory, arguments.tflops, arguments.link or 1.0,
            arguments.noise_rate or measured_noise_rate(), arguments.free, arguments.node_link,
        )  # fmt: skip
        phases = forecast(config, cluster, arguments.rate)
    except RunError as error:
        return complain(error)
    print((as_json if arguments.json else as_text)(phases, cluster))
    return DONE


def measured_noise_rate() -> float:
    from murmuration.train.noise.aes import NOISE_CHUNK, AESNoise

    mechanism = AESNoise(b"p" * 32, 1.0, 1.0)
    mechanism.draw(0, 0, 0, NOISE_CHUNK)
    began = time.perf_counter()
    mechanism.draw(1, 0, 0, NOISE_CHUNK)
    return NOISE_CHUNK / (time.perf_counter() - began)
