"""A run on a disk of its own, in a mount namespace of its own, that fails and recovers while it trains."""

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
        assert job.until(lambda: (checkpoints / "last").exists()), job.said()
        break_disk(kind, disk)
        assert job.until(lambda: "was not saved" in job.said()), job.said()
        usable = str((checkpoints / "last").resolve())
        if choice == "go on":
            # Further steps, and saves that fail. A full disk need not have room for their lines in metrics.jsonl.
            assert job.until(lambda: job.said().count("was not saved") >= 3), job.said()
            mend_disk(kind, disk)
        codes = job.wait()
        said = job.said()
    if choice == "stop":
        mend_disk(kind, disk)
    steps = [json.loads(line)["step"] for line in (logs / "run" / "metrics.jsonl").read_text().splitlines()]
    with Job(settings, 1, folder, logs) as again:  # whatever happened, the run can be gone on with
        finished = again.wait()
        said_again = again.said()
    newest = sorted(path.name for path in checkpoints.glob("step_*"))
    (folder / "found.json").write_text(
        json.dumps(
            {
                "codes": codes,
                "said": said,
                "steps": steps,
                "usable": usable,
                "newest": newest,
                "finished": finished,
                "said_again": said_again,
            }
        )
    )
    subprocess.run(["umount", "-l", str(disk)], check=False)


def break_disk(kind, disk):
    if kind == "readonly":
        while subprocess.run(["mount", "-o", "remount,ro", str(disk)], capture_output=True).returncode:
            pass  # as long as a file is open for writing
        return
    with (disk / "filler").open("wb", buffering=0) as filler:
        size = MIB
        while size:
            try:
                if filler.write(bytes(size)) < size:
                    size //= 2
            except OSError:
                size //= 2


def mend_disk(kind, disk):
    if kind == "readonly":
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    else:
        (disk / "filler").unlink()


if __name__ == "__main__":
    main(*sys.argv[1:])
