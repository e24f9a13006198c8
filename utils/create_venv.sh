#!/bin/sh
# create_venv.sh PYTHON VENV [DIFFUSERS_VERSION]: an environment with this package, its tests' needs and ruff.
# A torch that PYTHON has already is used as it is; otherwise torch 2.13.0 is installed.
set -eu
python=$1 venv=$2 diffusers=${3:-}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
    echo "Python 3.10 or later is needed; $python is $("$python" --version 2>&1). Name another: make PYTHON=python3.11 ..." >&2
    exit 1
}
"$python" -m venv "$venv"
pip="$venv/bin/python -m pip install --quiet --disable-pip-version-check"
constraints="$venv/constraints.txt"

if torch=$("$python" -c 'import torch; print(torch.__version__)' 2>/dev/null); then
    echo "using torch $torch of $python"
    # What that Python can import can be imported here too, after what is installed here.
    "$python" -c 'import site, sysconfig; print(*dict.fromkeys([sysconfig.get_path("platlib"), sysconfig.get_path("purelib"), *site.getsitepackages(), site.getusersitepackages()]), sep="\n")' \
        > "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/the_python_below.pth"
    echo "torch==$torch" > "$constraints"
else
    echo "installing torch 2.13.0"
    echo "torch==2.13.0" > "$constraints"
    $pip "torch==2.13.0"
fi
if [ -n "$diffusers" ]; then
    echo "diffusers==$diffusers" >> "$constraints"
fi
$pip --constraint "$constraints" --editable ".[test,quality]"
"$venv/bin/python" -c 'import torch, diffusers; print("ready: torch", torch.__version__, "diffusers", diffusers.__version__)'
