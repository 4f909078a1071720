"""Measures Table 3's latency: the time that each saliency detector adds to a training step."""

import json

from reproduction.studies.plan import SCALES, Settings
from reproduction.system.terminal import Parser, one_line_errors, positive


@one_line_errors("measure_latency.py")
def main() -> None:
    """Writes latency.json next to the runs of the scale and prints it."""
    parser = Parser(description=__doc__)
    parser.add_argument("--batch-size", type=positive, help="images per step (default: 128)")
    parser.add_argument("--repeats", type=positive, help="timed rounds (default: 20; smoke: 5)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--scale", choices=SCALES, default="full", help="as for reproduce.py")
    parser.add_argument("--outputs", default="outputs", help="folder of all runs")
    args = parser.parse_args()
    settings = Settings(scale=args.scale, outputs=args.outputs)
    from reproduction.studies.latency import measure_latency

    path = measure_latency(settings, args.device, args.batch_size, args.repeats)
    latency = json.loads(path.read_text())
    conditions = f"{latency['model']}, batch of {latency['batch_size']}, {latency['precision']}"
    print(f"{conditions}, on {latency['hardware']}")
    for name, ms in latency["detectors"].items():
        print(f"{name}: {ms['median_ms']:.1f} ms ({ms['low_ms']:.1f} to {ms['high_ms']:.1f})")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
