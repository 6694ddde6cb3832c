"""A training without a stop beside one that is resumed."""


def whole_and_resumed(made, closed, folder, settings, steps):
    """Two trainings that have made `steps` steps: one at once in folder/whole, and one in folder/cut from a checkpoint
    after half of them. made(folder, *overrides) -> a training; closed(training) ends it."""
    whole = made(folder / "whole", *settings)
    whole.run()
    first = made(folder / "cut", *settings, f"steps={steps // 2}")
    first.run()
    closed(first)
    second = made(folder / "cut", *settings, "resume=auto")
    second.run()
    return whole, second
