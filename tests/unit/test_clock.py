# extra: template
"""The seconds of an interval on a device that lags behind the host are those of the device."""

from unittest import mock

import pytest
import torch

from utils.clock import PhaseClock


class Device:
    """Steps take 3 s on it and 1 s on the host. A time stamp has the time at which the device reaches it."""

    def __init__(self):
        self.host = self.done = 0.0

    def step(self, clock, number):
        clock.begin_step(number)
        clock.enter_phase("forward")
        self.done = max(self.done, self.host) + 1.0
        clock.enter_phase("backward")
        self.done += 2.0
        clock.enter_phase("update")
        self.host += 1.0

    def evaluate(self, clock):
        """It ends with a read, for which the host waits."""
        clock.pause_steps()
        clock.enter_phase("evaluation")
        self.host = self.done = max(self.done, self.host) + 100.0

    def event(self, enable_timing):
        at = []
        event = mock.Mock(at=at, record=lambda: at.append(max(self.done, self.host)))
        event.elapsed_time = lambda end: 1000 * (end.at[0] - event.at[0])
        return event


@pytest.mark.parametrize("is_read_later", [False, True])
def test_intervals_have_the_seconds_of_the_device_also_the_first_one_and_one_with_an_evaluation(is_read_later):
    device, intervals = Device(), []
    with (
        mock.patch.object(torch, "Event", device.event),
        mock.patch("utils.clock.time.perf_counter", lambda: device.host),
    ):
        clock = PhaseClock(torch.device("cuda", 0))
        for number in range(1, 13):
            device.step(clock, number)
            if number % 4 == 0:
                intervals.append(clock.take_step_times())
                if not is_read_later:
                    device.host = max(device.done, device.host)  # as a read at once would make it
            if number == 6:
                device.evaluate(clock)
        assert [interval()[::2] for interval in intervals] == [(12.0, 4.0)] * 3


def test_without_an_accelerator_the_seconds_are_those_of_the_host():
    now = [0.0]
    with mock.patch("utils.clock.time.perf_counter", lambda: now[0]):
        clock, intervals = PhaseClock(torch.device("cpu")), []
        for number in range(1, 5):
            clock.begin_step(number)
            for phase, seconds in (("data", 2.0), ("forward", 3.0), ("backward", 4.0), ("update", 5.0)):
                clock.enter_phase(phase)
                now[0] += seconds
            if number % 2 == 0:
                intervals.append(clock.take_step_times())
            if number == 3:
                clock.enter_phase("evaluation")
                now[0] += 100.0
        assert [interval() for interval in intervals] == [(28.0, 4.0, 6.0)] * 2
