#!/bin/bash
# Builds both modules into the checkout, for the GPU at hand only.
set -e
cd "$(dirname "$0")/../.."
cmake -S . -B build/gpu -G Ninja -DPython_EXECUTABLE="$(which python3)" -DSDM_CUDA=ON -DSDM_CUDA_ARCHS=90
cmake --build build/gpu
cmake --install build/gpu --prefix .
