#!/usr/bin/env bash
# Train two DDP ranks on the synthetic data set, on a laptop without a GPU. It fails below 90 % top-1.
# ---- extra: chaos and reports and exact ----
# With --kill it trains once on four ranks without interruption. It trains once more with three SIGKILLs, after which
# the run continues on one, two and four ranks. It compares the results and plots both curves, and fails if the weights
# are not bitwise equal.
# ---- end of chaos and reports and exact ----
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib/env.sh
find_python

number=1
while [ -e "runs/quickstart-$number" ]; do number=$((number + 1)); done
[[ " $*" != *" --resume_from"* ]] || number=$((number > 1 ? number - 1 : 1)) # the latest run goes on
run=runs/quickstart-$number
flags=(--dataset_size 2500 --image_size 12 --batch_size 32 --epochs 6 --lr 0.02 --log_interval 10)
backend() { "$PYTHON" -c "import torch; print('auto' if torch.cuda.device_count() >= $1 else 'gloo')"; }

# ---- extra: chaos and reports and exact ----
if [ "${1:-}" = --kill ]; then
    shift
    export OMP_NUM_THREADS=1
    flags+=(--backend "$(backend 4)" --save_every_steps 2 --reduction exact --global_batch_size 256 "$@")
    whole=$run/uninterrupted-on-4-ranks killed=$run/killed-on-4-1-and-2-ranks
    echo "A run trains uninterrupted on four ranks:"
    "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node=4 train.py --run_dir "$whole" "${flags[@]}"
    echo "The same run is killed on four ranks, on one and on two:"
    "$PYTHON" scripts/chaos.py --ranks 4,1,2 --faults 3 --every-steps 8 --seed "${SEED:-$RANDOM}" -- \
        --run_dir "$killed" "${flags[@]}"
    exec "$PYTHON" scripts/runs.py --compare "$whole" "$killed" --plot "$run/curves.svg" \
        --title "One run, uninterrupted and killed 3 times: equal bits on 4, 1 and 2 ranks with --reduction exact"
fi
# ---- end of chaos and reports and exact ----

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$("$PYTHON" -c 'from utils.cpus import count_usable_cpus; print(max(1, count_usable_cpus() // 2))')}
"$PYTHON" -m torch.distributed.run --standalone --nproc-per-node=2 train.py \
    --run_dir "$run" --backend "$(backend 2)" "${flags[@]}" "$@"
"$PYTHON" - "$run" <<'EOF'
import json, sys
top1 = json.load(open(f"{sys.argv[1]}/summary.json"))["best"]["top1"]
if top1 < 0.9:
    text = f"quickstart: top-1 {top1:.1%} is below 90 %, so this machine or this code is broken."
    sys.exit(f"{text} See {sys.argv[1]}/logs.")
print(f"\nquickstart: two ranks reached {top1:.1%} top-1.")
EOF
echo "Next:"
echo "  ${PYTHON#"$PWD"/} -m torch.distributed.run --standalone --nproc-per-node=2 train.py --epochs 5"
# ---- extra: images ----
echo "  ${PYTHON#"$PWD"/} train.py --dataset imagefolder --data_dir FOLDER   your own images, FOLDER/train/<class>/*"
# ---- end of images ----
echo "  less docs/wrap-your-script.md   your own model and data: model.py, dataset.py"
