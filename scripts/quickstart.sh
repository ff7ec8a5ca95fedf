#!/usr/bin/env bash
# Two DDP ranks learn the synthetic set, on a laptop without a GPU in about two minutes. Exits non-zero below 90 % top-1.
# With --kill: the same on four ranks, once undisturbed and once killed three times from outside and gone on with; both
# results beside each other, and a picture of the two curves. Exits non-zero when they are not the same to the bit.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/env.sh
find_python

number=1
while [ -e "runs/quickstart-$number" ]; do number=$((number + 1)); done
run=runs/quickstart-$number
cores=$("$PYTHON" -c 'import os; print(os.cpu_count())')
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > 3 ? cores / 2 : 1))}
backend=$("$PYTHON" -c 'import torch; print("auto" if torch.cuda.device_count() > 1 else "gloo")')

if [ "${1:-}" = --kill ]; then
    shift
    export OMP_NUM_THREADS=1
    [ "$backend" = gloo ] || backend=$("$PYTHON" -c 'import torch; print("auto" if torch.cuda.device_count() > 3 else "gloo")')
    flags=(--backend "$backend" --dataset_size 2500 --epochs 4 --log_interval 5 --save_every_steps 2 "$@")
    echo "first, undisturbed:"
    "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node=4 train.py --run_dir "$run-whole" "${flags[@]}"
    echo "now killed three times from outside:"
    "$PYTHON" scripts/torment.py --ranks 4 --faults 3 --every-steps 8 --seed "${SEED:-$RANDOM}" -- --run_dir "$run-killed" "${flags[@]}"
    exec "$PYTHON" scripts/compare.py "$run-whole" "$run-killed" --plot "$run-killed/curves.svg"
fi

"$PYTHON" -m torch.distributed.run --standalone --nproc-per-node=2 \
    train.py --run_dir "$run" --backend "$backend" --dataset_size 2500 --epochs 4 --log_interval 5 "$@"

"$PYTHON" - "$run" <<'PY'
import json, sys
top1 = json.load(open(f"{sys.argv[1]}/summary.json"))["best_top1"]
if top1 < 0.9:
    sys.exit(f"top-1 {top1:.1%} is below 90 %: something is wrong with this machine or this code; look into {sys.argv[1]}/logs")
print(f"\nquickstart: two ranks reached {top1:.1%} top-1.")
PY
cat <<EOF
Type next:
  ${PYTHON#"$PWD"/} -m torch.distributed.run --standalone --nproc-per-node=2 train.py --epochs 5    your own run (--help for all flags)
  ${PYTHON#"$PWD"/} train.py --dataset imagefolder --data_dir FOLDER                              your own images, FOLDER/train/<class>/*
  less README.md                                                                      your own model and data: model.py, dataset.py
EOF
