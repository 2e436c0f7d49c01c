# Install this checkout into an existing environment, so that no package that is there changes (make PYTHON_ENV=/path).
# Arguments: its folder, its Python, what to install, and the command that leaves it alone. GIVEN: as the user wrote it.
folder=$1 python=$2 target=$3 instead=$4

fail() {
    printf '%s\n' "PYTHON_ENV=$GIVEN: $@" >&2
    exit 1
}

error=$(ls -dL "$python" 2>&1 > /dev/null) ||
    fail "$python$([ ! -L "$python" ] || echo ", a link to $(readlink -m "$python")"): ${error##*: }." \
        "  Name an environment's folder (its sys.prefix), such as /opt/conda."
error=$("$python" -c '' 2>&1 > /dev/null) || fail "$python cannot be run: ${error##*: }"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' > /dev/null ||
    fail "repro-matrix needs Python 3.10 or newer. Measure it from .venv:" "  $instead"
"$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' > /dev/null ||
    fail "it has no torch. Install torch there, or leave out PYTHON_ENV to create .venv."
other=$("$python" -c 'import os, repro_matrix as r; print("\n=" + os.path.realpath(r.__file__))' 2> /dev/null | sed -n 's/^=//p')
case $other in
    "" | "$(pwd -P)"/harness/*) ;;
    *) fail "it has another repro-matrix, $(dirname "$other"), which would be replaced. Use that one, or remove it:" \
        "  $python -m pip uninstall repro-matrix (or uv pip uninstall --python $python repro-matrix)" \
        "Or leave it alone, and measure this environment from .venv:" "  $instead" ;;
esac

# pip installs a checkout without setup.py in editable mode from 21.3 on; `uv pip` is its equal.
uv=$(PATH=$folder/bin:$PATH command -v uv)
if "$python" -c 'import pip, sys; sys.exit([int(n) for n in pip.__version__.split(".")[:2]] < [21, 3])' > /dev/null 2>&1; then
    pip="$python -m pip" at=
elif [ "$uv" ]; then
    pip="$uv pip" at="--python $python"
else
    fail "it has no pip 21.3 or newer, and there is no uv, neither there nor on PATH. Nothing was installed. One of these helps:" \
        "  $python -m pip install -U pip" "  $python -m ensurepip    (if it has no pip)" "  python3 -m pip install uv"
fi
{ $pip list $at --format=freeze | grep -E '^[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+$' > "$PINS" && $pip install $at -q -c "$PINS" -e "$target"; } ||
    fail "the controller could not be installed there (above). No package that it had was changed." \
        "  conflicts, no permission, externally managed: leave it alone, and measure it from .venv:" "  $instead"
