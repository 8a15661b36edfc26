"""A run on a separate disk, in a mount namespace, that fails and recovers during the training."""

import json
import subprocess
import sys
from pathlib import Path

from kill_job import Job, Settings

MIB = 2**20


def main(kind, folder, choice):
    folder = Path(folder)
    logs = folder / "logs"
    disk = logs / "run" / "checkpoints" if kind == "readonly" else logs
    disk.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200m", "none", str(disk)], check=True)
    checkpoints = logs / "run" / "checkpoints"
    more = ("--keep-last", "2", *(["--stop-on-save-error"] if choice == "stop" else []))
    settings = Settings(steps=28, save_every=2, workers=0, precision="fp32", loss="fastclip-v3", more=more)
    with Job(settings, 2, folder, logs) as job:
        assert job.until(lambda: (checkpoints / "last").exists()), job.printed()
        break_disk(kind, disk)
        assert job.until(lambda: "was not saved" in job.printed()), job.printed()
        usable = str((checkpoints / "last").resolve())
        if choice == "continue":
            # Further steps and failed saves, whose lines in metrics.jsonl may not fit on the disk either.
            assert job.until(lambda: job.printed().count("was not saved") >= 3), job.printed()
            repair_disk(kind, disk)
        codes = job.wait()
        printed = job.printed()
    if choice == "stop":
        repair_disk(kind, disk)
    steps = [json.loads(line)["step"] for line in (logs / "run" / "metrics.jsonl").read_text().splitlines()]
    with Job(settings, 1, folder, logs) as resumed:
        finished = resumed.wait()
        printed_after = resumed.printed()
    newest = sorted(path.name for path in checkpoints.glob("step_*"))
    (folder / "result.json").write_text(
        json.dumps(
            {
                "codes": codes,
                "printed": printed,
                "steps": steps,
                "usable": usable,
                "newest": newest,
                "finished": finished,
                "printed_after": printed_after,
            }
        )
    )
    subprocess.run(["umount", "-l", str(disk)], check=False)


def break_disk(kind, disk):
    if kind == "readonly":
        while subprocess.run(["mount", "-o", "remount,ro", str(disk)], capture_output=True).returncode:
            pass  # fails while a file is open for writing
        return
    with (disk / "filler").open("wb", buffering=0) as filler:
        size = MIB
        while size:
            try:
                if filler.write(bytes(size)) < size:
                    size //= 2
            except OSError:
                size //= 2


def repair_disk(kind, disk):
    if kind == "readonly":
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    else:
        (disk / "filler").unlink()


if __name__ == "__main__":
    main(*sys.argv[1:])
