#!/bin/sh
# Builds the peer where nvcc, PyTorch's headers and (unpacked wheels) RMM's are: build.sh OUT [DIRECTORY WITH librmm AND rapids_logger].
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=$1
mkdir -p "$out"
python=${PYTHON:-python3}
torch=$($python -c 'import os, torch; print(os.path.dirname(torch.__file__))')
abi=$($python -c 'import torch; print(int(torch.compiled_with_cxx11_abi()))')
nvcc -O2 -std=c++17 -DPEER_TORCH -D_GLIBCXX_USE_CXX11_ABI="$abi" -I"$torch/include" -o "$out/peer-torch" "$here/peer.cpp" \
    -L"$torch/lib" -lc10_cuda -lc10 -Xlinker -rpath -Xlinker "$torch/lib"
if [ $# -gt 1 ]; then
    nvcc -O2 -std=c++20 --expt-relaxed-constexpr -DPEER_RMM -DLIBCUDACXX_ENABLE_EXPERIMENTAL_MEMORY_RESOURCE -I"$2/librmm/include" \
        -I"$2/librmm/include/rapids" -I"$2/rapids_logger/include" -o "$out/peer-rmm" "$here/peer.cpp" \
        -L"$2/librmm/lib64" -lrmm -L"$2/rapids_logger/lib64" -lrapids_logger \
        -Xlinker -rpath -Xlinker "$2/librmm/lib64:$2/rapids_logger/lib64"
fi
