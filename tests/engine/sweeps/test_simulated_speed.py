"""Simulated calls of a large model on many devices are quick, by the clock of their thread."""

import time

from test_simulated_runtime import BIG, Driver, colocated, ppo_step, prompts


def test_calls_of_70b_on_128_devices_take_milliseconds(monkeypatch):
    finish, spent = Driver.finish, []

    def timed(driver, work, do):
        start = time.thread_time()  # this thread's own: the machine may be busy with other things
        try:
            return finish(driver, work, do)
        finally:
            spent.append(time.thread_time() - start)

    monkeypatch.setattr(Driver, "finish", timed)
    best = 1.0
    for _ in range(10):
        spent.clear()
        driver = colocated(BIG, "tp8 pp4", "tp8", "lognormal")
        driver.put(prompts(256, 1024))
        ppo_step(driver, new_tokens=1024, mini_batches=4)
        best = min(best, sum(spent) / len(spent) * 20)
    assert best < 0.25, "20 calls: 0.05 s is what they take, on a machine at half its speed"
