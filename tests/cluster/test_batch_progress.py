from __future__ import annotations

import io

from cluster.batch_parts import Tally
from cluster.batch_progress import Progress, bar, duration, progress_line

BEFORE = Tally(lines=100, completion_tokens=1000, loops_run=4000)
NOW = Tally(lines=150, failed=3, completion_tokens=1500, loops_run=5250)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_line_tells_this_job_s_speed_and_what_is_left() -> None:
    assert progress_line(NOW, BEFORE, 400, 10.0) == (
        "150/400 lines (37 %), 50 tok/s, 2.50 loops/token, 3 failed, 0:00:50 left"
    )


def test_what_cannot_be_known_is_not_told() -> None:
    assert progress_line(BEFORE, BEFORE, 400, 10.0) == "100/400 lines (25 %), 0 tok/s"
    assert progress_line(Tally(), Tally(), 0, 0.0) == "0/0 lines (100 %)"


def test_a_log_gets_a_plain_line_now_and_then() -> None:
    out = io.StringIO()
    progress = Progress(out, 400, BEFORE, interval=10.0, started=0.0)
    for now in (5.0, 9.9, 10.0, 15.0, 20.5):
        progress.update(NOW, now)
    progress.close()
    lines = out.getvalue().splitlines()
    assert [line.split(",")[0] for line in lines] == ["loopmesh: 150/400 lines (37 %)"] * 2
    assert "\x1b" not in out.getvalue()


def test_a_terminal_gets_a_bar_that_is_drawn_over() -> None:
    out = Terminal()
    progress = Progress(out, 400, BEFORE, interval=10.0, started=0.0)
    for now in (0.1, 0.3, 0.4, 0.6):
        progress.update(NOW, now)
    progress.close()
    progress.close()
    assert out.getvalue().count("\r\x1b[K[#######.............] 150/400 lines") == 2
    assert out.getvalue().count("\n") == 1


def test_bars_and_times() -> None:
    assert [bar(done, 4).count("#") for done in range(5)] == [0, 5, 10, 15, 20]
    assert {len(bar(done, 3)) for done in range(4)} == {22}
    assert bar(0, 0).count("#") == 20
    assert [duration(value) for value in (0.4, 59.6, 3725.0)] == ["0:00:00", "0:01:00", "1:02:05"]
