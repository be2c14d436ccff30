"""python -m harness.deploy HOST...: see docs/deploy.md."""

from __future__ import annotations

import argparse
import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

from harness.deploy import hosts, source
from harness.deploy.plan import Options, Plan
from harness.deploy.records import Log, table, visible, write_record
from harness.deploy.session import Outcome, Session, rsync_objection
from harness.deploy.values import CudaArch, LocalFile, PythonName, Refused, RemotePath, phases, whole

USAGE = 2


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="python -m harness.deploy",
        description="Sends this source tree to machines over ssh, builds and installs it there, checks it, fetches "
        "the results.",
        allow_abbrev=False,
    )
    p.add_argument("hosts", nargs="+", metavar="HOST", help="alias of the hosts file, or [user@]host as ssh knows it")
    p.add_argument("--hosts", dest="hosts_file", metavar="FILE", help=f"default {hosts.DEFAULT_FILE}")
    p.add_argument("--source", metavar="DIR", help="the source tree (default: the one around the working folder)")
    p.add_argument("--root", metavar="PATH", help=f"the folder there (default {hosts.DEFAULT_ROOT})")
    p.add_argument("--python", metavar="NAME", help="the Python there (default: the first python3 that will do)")
    p.add_argument("--arch", metavar="LIST", help="CUDA architectures, as CMake has them (default: the project's)")
    p.add_argument("--cuda", metavar="AUTO|ON|OFF", help="the CUDA backend (default AUTO)")
    p.add_argument("--bench", action="store_true", help="run bench/phaseN_* there and fetch bench.json")
    p.add_argument("--tests", action="store_true", help="run tests/phaseN_* there")
    p.add_argument("--phase", metavar="N,N", help="only these phases of --bench and --tests (alone: --tests)")
    p.add_argument("--keep", default="3", metavar="N", help="releases to keep beside the current one (default 3)")
    p.add_argument("--retries", default="4", metavar="N", help="further tries after transport errors (default 4)")
    p.add_argument("--ssh-config", metavar="FILE", help="ssh -F FILE")
    p.add_argument("--accept-new-host-key", action="store_true", help="trust a host on its first connection")
    p.add_argument("--reports", metavar="DIR", help="where results go (default: reports/ of the source tree)")
    p.add_argument("--dry-run", action="store_true", help="print every argv, run nothing")
    return p


def targets(args: argparse.Namespace) -> list[hosts.Target]:
    """Hosts, with what the command line says about all of them."""
    file = Path(args.hosts_file or hosts.DEFAULT_FILE).expanduser()
    known = hosts.load(file) if args.hosts_file or file.exists() else {}
    found = hosts.resolve(args.hosts, known)
    if args.root is not None:
        found = [replace(t, root=RemotePath.parse(args.root)) for t in found]
    if args.python is not None:
        found = [replace(t, python=PythonName.parse(args.python)) for t in found]
    if args.arch is not None:
        found = [replace(t, arch=CudaArch.parse(args.arch)) for t in found]
    if args.cuda is not None:
        found = [replace(t, cuda=hosts.cuda(args.cuda)) for t in found]
    if sentence := hosts.duplicates(found):
        raise Refused(sentence)
    return found


def options(args: argparse.Namespace, root: Path) -> Options:
    """Everything that is the same for every host."""
    chosen = () if args.phase is None else phases(args.phase)
    return Options(
        bench=args.bench,
        tests=args.tests or (bool(chosen) and not args.bench),
        phases=chosen,
        keep=whole(args.keep, "--keep", 0, 100),
        retries=whole(args.retries, "--retries", 0, 20),
        ssh_config=None if args.ssh_config is None else LocalFile.parse(args.ssh_config),
        accept_new=args.accept_new_host_key,
        reports=Path(args.reports).absolute() if args.reports else root / "reports",
        date=time.strftime("%Y-%m-%dT%H-%M-%SZ", time.gmtime()),
        token=secrets.token_hex(8),
        by=visible(f"{getpass.getuser()}@{socket.gethostname()}")[:100],
    )


def check_programs() -> None:
    """Refused where ssh or rsync are missing here, or rsync is too old."""
    for program in ("ssh", "rsync"):
        if shutil.which(program) is None:
            raise Refused(f"{program} was not found here; install it")
    done = subprocess.run(["rsync", "--version"], capture_output=True, text=True, check=False)
    if objection := rsync_objection(done.stdout.partition("\n")[0], "here"):
        raise Refused(objection)


def deploy(plans: list[Plan], cancel: threading.Event) -> list[Outcome]:
    """All hosts side by side. Every report has its deploy.json afterwards."""
    sessions = []
    for plan in plans:
        plan.report.mkdir(parents=True)
        sessions.append(Session(plan, Log(plan.target.name, plan.report / "log.txt"), cancel))

    def work(plan: Plan, session: Session) -> None:
        outcome = session.run()
        try:
            write_record(plan, outcome)
        except OSError as error:
            outcome.code, outcome.error = outcome.code or 1, outcome.error or f"deploy.json: {error.strerror}"
        session.log.close()

    threads = [threading.Thread(target=work, args=pair) for pair in zip(plans, sessions, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [session.outcome for session in sessions]


class Interrupts:
    """SIGINT and SIGTERM tell the sessions to stop, which tell the other sides; the second one ends us at
    once."""

    def __init__(self) -> None:
        self.cancel = threading.Event()
        self.number = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: object) -> None:
        if self.cancel.is_set():
            os._exit(128 + number)
        self.number = number
        self.cancel.set()


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0, the remote's, or of docs/deploy.md."""
    args = parser().parse_args(argv)
    # ssh's control socket must have a short name, in a folder that only we can enter.
    with tempfile.TemporaryDirectory(prefix="kdt-", dir="/tmp") as sockets:
        try:
            root = Path(args.source).absolute() if args.source else source.find_root(Path.cwd())
            root = root.resolve()
            chosen = options(args, root)
            tree = source.read(root)
            plans = [Plan(target, tree, chosen, Path(sockets)) for target in targets(args)]
            if args.dry_run:
                print("\n\n".join("\n".join(plan.lines()) for plan in plans))
                return 0
            check_programs()
            while any(plan.report.exists() for plan in plans):  # a second deploy within the second
                time.sleep(1)
                chosen = replace(chosen, date=time.strftime("%Y-%m-%dT%H-%M-%SZ", time.gmtime()))
                plans = [replace(plan, options=chosen) for plan in plans]
        except Refused as error:
            print(f"error: {error}", file=sys.stderr)
            return USAGE
        interrupts = Interrupts()
        try:
            outcomes = deploy(plans, interrupts.cancel)
        except OSError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    print("\n".join(table(plans, outcomes)))
    for plan, outcome in zip(plans, outcomes, strict=True):
        if outcome.error:
            print(f"{outcome.name}: {visible(outcome.error)}", file=sys.stderr)
        print(f"{outcome.name}: {plan.report}", file=sys.stderr)
    codes = [outcome.code for outcome in outcomes if outcome.code]
    if interrupts.number:
        return 128 + interrupts.number
    return codes[0] if codes else 0


if __name__ == "__main__":
    sys.exit(main())
