"""What runs on the other side. These modules are sent as text, in the order of `MODULES`, and need nothing
but Python 3.8 or later and its standard library.

    ROOT/.kdtree-deploy             marker: without it nothing in ROOT is ever written or deleted
    ROOT/lock                       flock, held by the script and by all that it starts
    ROOT/source/                    what was sent, exactly
    ROOT/build/KEY/                 the build folder, kept from one release to the next
    ROOT/build-env/KEY/             the virtual environment that builds
    ROOT/packages/KEY/              what releases depend on, shared by those of the same dependencies
    ROOT/releases/DIGEST/           venv/, bundles/, results/DATE/; release.json is written last
    ROOT/current                    link to the release that passed its checks last
"""

MODULES = ("link", "root", "release", "main")

# The only text that a remote shell ever reads. It holds no '!', '$', backslash, backquote, line break or single
# quote, so that sh, csh and fish take it alike between single quotes.
BOOT = (
    "import sys,json,types;"
    'sys.version_info<(3,8) and sys.exit("python3 there is Python "+sys.version.split()[0]+"; name one that is 3.8 '
    'or later with --python");'
    "L=json.loads(sys.stdin.buffer.readline());"
    '[exec(compile(t,n,"exec"),sys.modules.setdefault(n,types.ModuleType(n)).__dict__) for n,t in L];'
    "sys.modules[L[-1][0]].main()"
)
