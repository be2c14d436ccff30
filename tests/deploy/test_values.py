"""What people type can become neither an option, nor shell text, nor a path elsewhere."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import mini
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.deploy import hosts, source
from harness.deploy.plan import Options, Plan
from harness.deploy.remote import BOOT
from harness.deploy.values import CudaArch, LocalFile, PythonName, Refused, RemotePath, SshHost, phases

HOSTILE_HOSTS = [
    "-oProxyCommand=touch /tmp/owned", "-oProxyCommand=x", "--help", "-", "-l", "-F/dev/null", "user@-oProxyCommand=x",
    "-user@host", "@host", "user@", "user@@host", "a@b@c", "", " ", "host name", " host", "host ", "host\n", "\nhost",
    "host\r", "host\0", "host\t", "$(id)", "`id`", "host;id", "host&id", "host|id", "host>x", "host<x", "host'",
    'host"', "host\\", "ho*st",
    "host?", "{a,b}", "~host", "!host", "host:22", "host:/etc", "::1", "[::1", "::1]", "[::1]:22",
    "[fe80::1%eth0]", "[-oX]", "[]", "[::1]x", "x[::1]", "ssh://host", "rsync://host/x", "host/path", "%h", "host%x",
    "h\u00f6st", "\uff0dhost",
    ".host", "..", "h" * 256, "user;id@host", "us er@host", "$HOME@host", "user:pw@host", "host#x",
    "host=x", "host,other", "host\x1b[2J", "\u202ehost", "host\u2028",
]  # fmt: skip
HOSTILE_PATHS = [
    "/", "//", "~", "~/", "/etc", "/etc/", "etc", "a/b", "", ".", "..", "/..", "/a/..", "/a/../b", "~/..", "~/../x",
    "/a/./b", "/a//b", "/a/b/", "~root/x", "~user", "-x", "/a/-rf", "~/-rf", "/a b/c", "/a/$(id)", "/a/`id`", "/a/b;id",
    "/a/b&", "/a/b|c", "/a/b>c", "/a/*", "/a/?", "/a/{b,c}", "/a/b'", '/a/b"', "/a/b\\", "/a/b\n", "/a/\0b",
    "host:/a/b", "/a/b:c", "$HOME/x", "/a/%h", "/a/#b", "/a/~b", "/a/!b", "/" + "a/" * 150 + "b",
    "/a/\u00e9", "\\\\a\\b", "C:/a/b",
]  # fmt: skip
HOSTILE_PYTHONS = ["-c", "python3 -c", "python3;id", "$(id)", "`id`", "../python3", "/usr/../bin/sh", "./python3",
                   "~/python3", "bin/python3", "", " ", "python3\n", "/", "/usr/bin/", "a'b", 'a"b', 
                   "/usr//bin/python3", "p" * 201]  # fmt: skip
HOSTILE_ARCHS = ["", "-1", "120;", ";120", "9", "120b", "native;90", "all,90", "120 90", "120\n", "$(id)", "120;-DX=1",
                 "90-ptx", "1200"]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE_HOSTS, ids=ascii)
def test_hostile_hosts_are_refused(text: str) -> None:
    """Catches a host that ssh would take for an option, or that any shell or %-expansion would read."""
    with pytest.raises(Refused, match=r"(?s)host .* is refused"):
        SshHost.parse(text)


@pytest.mark.parametrize(
    "kind, text",
    [(RemotePath, t) for t in HOSTILE_PATHS]
    + [(PythonName, t) for t in HOSTILE_PYTHONS]
    + [(CudaArch, t) for t in HOSTILE_ARCHS]
    + [(LocalFile, t) for t in ("-x", "a b", "a'b", 'a"b', "a\\b", "a\nb", "", "a;b", "a$b")],
    ids=ascii,
)
def test_hostile_values_are_refused(kind: type, text: str) -> None:
    """Catches a path that leaves its place or a value that is read as something else."""
    with pytest.raises(Refused):
        kind.parse(text)  # type: ignore[attr-defined]


def test_good_values_pass() -> None:
    """Catches grammars that refuse what people have."""
    for text in (
        "box",
        "root@10.0.0.5",
        "user.name@gpu-1.example.org",
        "h_1",
        "[::1]",
        "me@[2001:db8::1]",
        "a@127.0.0.1",
    ):
        host = SshHost.parse(text)
        assert host.for_rsync(RemotePath.parse("~/x"), "s/") == f"{text}:x/s/"
        assert host.for_ssh() == text.replace("[", "").replace("]", "")
    for text in ("~/kdtree-engine", "/data/kdtree", "/srv/a.b/c_d-e+f@g", "~/.cache/kdtree"):
        assert RemotePath.parse(text).text == text
    for text in ("python3", "python3.12", "/usr/bin/python3", "/opt/py-3.12+x/bin/python3"):
        assert PythonName.parse(text).text == text
    assert CudaArch.parse("90,120a-real").text == "90;120a-real" and CudaArch.parse("native").text == "native"
    assert phases("2,0,2") == (0, 2)


@pytest.mark.parametrize("text", ["", "x", "-1", "1,", "100", "1;2", "1 2", "\u0661"])
def test_phases_are_numbers(text: str) -> None:
    """Catches a phase that names another folder."""
    with pytest.raises(Refused):
        phases(text)


@given(st.text(max_size=40) | st.from_regex(r"[-@a-z.\[\]:%$;' ]{0,12}", fullmatch=True))
def test_whatever_is_accepted_is_one_plain_word(text: str) -> None:
    """Catches a hole in a grammar: no accepted value is split or changed by a shell, or begins with a dash."""
    for kind in (SshHost, RemotePath, PythonName, CudaArch):
        try:
            kind.parse(text)  # type: ignore[attr-defined]
        except Refused:
            continue
        assert not text.startswith("-") and not re.search(r"[\s'\"\\`$&|<>(){}*?!#^%\x00-\x1f]", text)
        assert kind is CudaArch or ";" not in text
        assert kind in (CudaArch, RemotePath) or shlex.split(text) == [text]


def run(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "harness.deploy", "--source", str(mini.write(folder / "source")), *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL)


@pytest.mark.parametrize(
    "argv",
    [
        ("--", "-oProxyCommand=touch owned"),
        ("$(touch owned)",),
        ("x;touch owned",),
        ("[::1]:22",),
        ("box", "--root", "/"),
        ("box", "--root", "~/a;touch owned"),
        ("box", "--python", "python3 -c 'x'"),
        ("box", "--arch", "120;-DX"),
        ("box", "--cuda", "maybe"),
        ("box", "--ssh-config", "a b"),
        ("box", "--keep", "-1"),
        ("box", "--phase", "x"),
        ("box", "--hosts", "/there/is/none"),
        ("box", "box"),
        ("box", "--no-such-option"),
        ("box", "--ret", "1"),
        (),
    ],
    ids=ascii,
)
def test_refusals_run_nothing(argv: tuple[str, ...], trap: Path, tmp_path: Path) -> None:
    """Catches a value that is refused only after ssh, rsync or a shell has seen it."""
    done = run(tmp_path, *argv)
    assert done.returncode == 2 and "error: " in done.stderr and "Traceback" not in done.stderr and done.stdout == ""
    assert trap.read_text() == "" and not (tmp_path / "source/reports").exists()


def plan_of(folder: Path, target: hosts.Target) -> Plan:
    options = Options(date="2026-01-02T03-04-05Z", reports=folder / "reports", token="t", by="me")
    return Plan(target, source.read(mini.write(folder / "source")), options, Path("/tmp/kdt-x"))


def test_dry_run_prints_the_argv_and_runs_nothing(trap: Path, tmp_path: Path) -> None:
    """Catches a dry run that connects, or prints other commands than a deploy runs."""
    done = run(tmp_path, "me@gpu-1", "--dry-run", "--root", "~/x", "--arch", "120", "--accept-new-host-key")
    assert done.returncode == 0 and trap.read_text() == "" and not (tmp_path / "source/reports").exists()
    words = {line.split()[0]: shlex.split(line.split(None, 1)[1]) for line in done.stdout.splitlines()[-5:-1]}
    assert words["connect"][0] == "ssh" and words["connect"][-3:-1] == ["--", "me@gpu-1"]
    assert "StrictHostKeyChecking=accept-new" in words["connect"] and "-F" not in words["connect"]
    assert shlex.split(words["connect"][-1]) == ["python3", "-I", "-c", BOOT]
    assert words["send"][-3:] == ["--", f"{tmp_path.resolve()}/source/", "me@gpu-1:x/source/"]
    digest = re.search(r"releases/([0-9a-f]{16})", done.stdout)
    assert digest is not None
    assert words["fetch"][-2].startswith(f"me@gpu-1:x/releases/{digest[1]}/results/2")


def test_no_user_text_reaches_a_shell(tmp_path: Path) -> None:
    """Catches a command line for the other side, or an --rsh text, that is put together from values: the first is
    one constant and a Python's name, and the second has no element with a blank."""
    target = hosts.Target(
        "box", SshHost.parse("me@[::1]"), 2222, RemotePath.parse("/data/x"), PythonName.parse("/o/p3")
    )
    plan = plan_of(tmp_path, target)
    ssh = plan.ssh_argv()
    assert ssh[-1] == shlex.join(["/o/p3", "-I", "-c", BOOT]) and ssh[-3:-1] == ["--", "me@::1"]
    assert ssh[ssh.index("-p") + 1] == "2222"
    for argv in (plan.push_argv(), plan.fetch_argv()):
        rsh = argv[argv.index("--rsh") + 1].split()
        assert rsh == [word.replace("ControlMaster=yes", "ControlMaster=no") for word in ssh[: ssh.index("-T")]]
        assert argv[-3] == "--" and sum(word.startswith("me@[::1]:/data/x/") for word in argv[-2:]) == 1
    assert not set("!$\\`\n'") & set(BOOT)


def test_ssh_is_the_users_own(tmp_path: Path) -> None:
    """Catches a deploy that ignores the user's ssh configuration, or lets it forward agents or trust strangers."""
    argv = plan_of(tmp_path, hosts.Target("box", SshHost.parse("box"))).ssh_argv()
    options = [argv[i + 1] for i, word in enumerate(argv) if word == "-o"]
    assert not any(option.startswith(("UserKnownHosts", "Identity", "Proxy", "Port", "User=")) for option in options)
    assert {"BatchMode=yes", "ForwardAgent=no", "StrictHostKeyChecking=yes"} <= set(options)


def test_hosts_file(tmp_path: Path) -> None:
    """Catches keys that are ignored, and errors without the file's and the alias's name."""
    path = tmp_path / "hosts.toml"
    path.write_text(
        '[gpu]\nhost = "root@10.0.0.5"\nport = 2222\nroot = "/data/kdtree"\npython = "python3.12"\narch = "120"\n'
        'cuda = "on"\n'
        '[other]\nhost = "other.example"\n'
    )
    known = hosts.load(path)
    gpu = known["gpu"]
    assert (gpu.host, gpu.port, gpu.cuda) == (SshHost("root", "10.0.0.5"), 2222, "ON")
    assert (gpu.root.text, gpu.python, gpu.arch) == ("/data/kdtree", PythonName("python3.12"), CudaArch("120"))
    assert known["other"].root.text == hosts.DEFAULT_ROOT
    assert hosts.resolve(["gpu", "me@x"], known) == [gpu, hosts.Target("me@x", SshHost("me", "x"))]
    for text, words in (
        ('[gpu]\nhost = "-oX"\n', "[gpu]: host '-oX'"),
        ('[gpu]\nhost = "x"\nshell = "id"\n', "unknown key 'shell'"),
        ("[gpu]\nport = 1\n", "host is missing"),
        ('[gpu]\nhost = "x"\nport = 70000\n', "port '70000'"),
        ('[gpu]\nhost = "x"\nport = true\n', "port must be a number"),
        ('[gpu]\nhost = "x"\nroot = "/"\n', "remote folder '/'"),
        ("[gpu]\nhost = 1\n", "host must be a string"),
        ('["../x"]\nhost = "x"\n', "alias '../x'"),
        ('gpu = "x"\n', "expected a table"),
        ("[gpu\n", "is not TOML"),
    ):
        path.write_text(text)
        with pytest.raises(Refused, match=re.escape(words)) as caught:
            hosts.load(path)
        assert str(path) in str(caught.value)


def test_report_folders_are_folders(tmp_path: Path) -> None:
    """Catches a host whose name is a path, and two hosts with one report folder."""
    ipv6 = hosts.Target("[::1]", SshHost.parse("[::1]"))
    assert plan_of(tmp_path, ipv6).report == tmp_path / "reports" / "__1" / "2026-01-02T03-04-05Z"
    box = hosts.Target("a", SshHost.parse("box"))
    assert hosts.duplicates([box, hosts.Target("b", SshHost.parse("box"))]) is not None
    assert hosts.duplicates([box, hosts.Target("b", SshHost.parse("box"), port=1)]) is None


def test_only_listed_files_are_sent(tmp_path: Path) -> None:
    """Catches keys, hidden files, links and build products that travel, and files that stay behind unnoticed."""
    root = mini.write(tmp_path / "source")
    good = set(source.read(root).files)
    for name in (
        ".env", ".git/config", "id_ed25519", "secrets.toml", "python/.env", "python/id_rsa", "python/token.pem",
        "python/x.so", "python/kdtree_engine/_native.pyi", "cpp/a b.h", "cpp/-x.h", "cpp/x.h~",
        "tests/__pycache__/x.py", "bench/results/x.json", "build/x.h", "reports/box/x.json", "bundles/x.kdtr",
        "cpp/x\n.h",
    ):  # fmt: skip
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("secret")
    (root / "cpp/link.h").symlink_to(root / "secrets.toml")
    (root / "tests/linked").symlink_to(root / ".git")
    tree = source.read(root)
    assert set(tree.files) == good
    assert {"python/.env", "python/id_rsa", "python/token.pem", "cpp/link.h", "tests/linked", "cpp/-x.h"} <= set(
        tree.left_out
    )
    (root / "cpp/new.h").touch()
    assert set(source.read(root).files) == good | {"cpp/new.h"}


def test_the_commit_of_what_is_sent(tmp_path: Path) -> None:
    """Catches a report that does not say what was deployed, one that calls a changed tree by its commit alone, and the
    commit of a repository that only surrounds the tree."""
    root = mini.write(tmp_path / "source")

    def git(*words: str) -> str:
        who = ("-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "commit.gpgsign=false")
        done = subprocess.run(["git", *who, *words], cwd=root, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    alone = source.read(root)
    assert (alone.commit, alone.dirty) == (None, None)
    git("init", "-q", str(tmp_path))
    assert source.read(root).commit is None
    git("init", "-q")
    git("add", "-A")
    git("commit", "-q", "-m", "one")
    clean = source.read(root)
    assert (clean.commit, clean.dirty) == (git("rev-parse", "HEAD"), False)
    (root / "cpp/new.h").touch()
    changed = source.read(root)
    assert (changed.commit, changed.dirty) == (clean.commit, True)
    assert clean.digest() == alone.digest()


def test_digest_names_what_is_built(tmp_path: Path) -> None:
    """Catches two releases of one name, and one release of two names."""
    root = mini.write(tmp_path / "source")
    first = source.read(root)
    (root / "cpp/one.c").touch()
    assert source.read(root).digest(a="1") == first.digest(a="1") != first.digest(a="2")
    (root / "cpp/one.c").chmod(0o755)
    assert source.read(root).digest(a="1") != first.digest(a="1")


@pytest.mark.parametrize(
    "change",
    [
        ("requires = []", 'requires = ["--index-url=http://x/"]'),
        ("requires = []", 'requires = ["x @ file:///etc"]'),
        ("requires = []", "requires = [1]"),
        ('requires-python = ">=3.11"', 'requires-python = "3"'),
        ('name = "kdtree-engine"', 'name = "-e"'),
        ("[project]", "[project"),
    ],
    ids=ascii,
)
def test_hostile_projects_are_refused(change: tuple[str, str], tmp_path: Path) -> None:
    """Catches a build requirement that pip on the other side would take for an option or an address."""
    root = mini.write(tmp_path / "source")
    text = (root / "pyproject.toml").read_text()
    (root / "pyproject.toml").write_text(text.replace(*change))
    assert (root / "pyproject.toml").read_text() != text
    with pytest.raises(Refused, match=r"pyproject\.toml"):
        source.read(root)
