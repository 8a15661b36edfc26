"""What long work shows where no bar can be drawn."""

from leanclip import progress


def test_a_log_file_gets_a_line_a_minute(capsys, monkeypatch):
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with progress.progress_bar("embedding [x]", 1000) as advance:
        for _ in range(20):
            now += 15
            advance(50)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 5  # of five minutes
    assert lines[0] == "embedding [x]: 20%, 4.0 min left"
    assert lines[-1] == "embedding [x]: 100%, 0.0 min left"


def test_short_or_hidden_work_prints_nothing(capsys, monkeypatch):
    with progress.progress_bar("embedding", 10) as advance:
        advance(10)
    monkeypatch.setattr(progress, "SECONDS_PER_LINE", 0.0)
    with progress.progress_bar("embedding", 10, shown=False) as advance:
        advance(10)
    assert capsys.readouterr().err == ""
