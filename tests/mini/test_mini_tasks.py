# SPDX-License-Identifier: Apache-2.0
"""The miniature's tasks: what they ask, what they accept, and that training never sees
a held-out problem.
"""

import re

import pytest
import torch

from repro.mini import tasks
from repro.mini.policy.tokens import tokenizer
from repro.mini.tasks import EOS, NO_ANSWER
from upref.errors import InputError

ALL = [tasks.get(name) for name in tasks.TASKS]
each_task = pytest.mark.parametrize("task", ALL, ids=tasks.TASKS)


@each_task
def test_shapes_and_words(task):
    problems, tokens = task.demonstrations(50, "walk", tasks.generator(0))
    assert tokens.shape == (50, task.response_length)
    prompts = task.prompts(problems)
    assert prompts.shape == (50, task.prompt_length)
    assert max(prompts.max(), tokens.max()) < len(task.words) == len(set(task.words))


@each_task
def test_what_is_demonstrated_is_well_formed(task):
    verdict = task.verify(*task.demonstrations(2000, "walk", tasks.generator(1)))
    assert verdict.valid.all()
    assert 0.1 < verdict.reward.mean() < 0.9


@each_task
def test_held_out_problems_are_never_trained_on(task):
    """No held-out problem is among the training problems or, where there are no
    pictures, the demonstrations.
    """

    def seen(split, n):
        """Return the prompts of a split's problems as a set of rows, pictures included."""
        problems = task.problems(split, n, seed=3)
        inputs = [task.prompts(problems)]
        if (pictures := task.pictures(problems)) is not None:
            inputs.append(pictures.flatten(1)[:, ::7])
        return {
            tuple(row) for row in torch.cat([x.double() for x in inputs], 1).tolist()
        }

    trained = seen("train", 3000)
    demonstrated = {
        tuple(r)
        for r in task.prompts(
            task.demonstrations(3000, "walk", tasks.generator(2))[0]
        ).tolist()
    }
    for split in ("test", *task.levels):
        held_out = seen(split, 100)
        assert len(held_out) > 50
        assert not held_out & trained
        if task.pictures(task.problems("test", 1, 0)) is None:
            assert not held_out & demonstrated


@each_task
def test_problems_come_again(task):
    for split in ("train", "test", *task.levels):
        a, b, c = (task.problems(split, 40, seed) for seed in (5, 5, 6))
        assert torch.equal(a, b)
        assert not torch.equal(a, c)


@each_task
def test_unknown_set_is_one_sentence(task):
    with pytest.raises(InputError, match="has no set 'hard'"):
        task.problems("hard", 4, 0)


@each_task
def test_words_of_the_tokenizer_are_the_task_s(task):
    words = tokenizer(task)
    prompt = task.prompts(task.problems("test", 1, 0))[0].tolist()
    text = " ".join(task.words[i] for i in prompt[1:])
    assert words(text).input_ids == prompt
    assert len(words) == len(task.words)


# ---- countdown by hand ---------------------------------------------------------------
COUNTDOWN = tasks.get("countdown")


def judge(numbers, target, text):
    said = [COUNTDOWN.words.index(word) for word in text.split()]
    tokens = torch.tensor([said + [0] * (COUNTDOWN.response_length - len(said))])
    verdict = COUNTDOWN.verify(torch.tensor([[*numbers, target]]), tokens)
    return verdict.reward.item(), verdict.valid.item(), verdict.answer.item()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7 * 12 84 <eos>", (1, True, 84)),
        ("12 * 7 84 <eos> 3 3 3", (1, True, 84)),  # nothing after <eos> counts
        ("3 + 4 7 7 * 12 84 <eos>", (1, True, 84)),
        ("7 + 3 10 12 - 4 8 8 * 10 80 <eos>", (0, True, 80)),
        ("7 * 12 85 <eos>", (0, False, NO_ANSWER)),  # wrong arithmetic
        ("7 * 12 84", (0, False, NO_ANSWER)),  # no <eos>
        ("7 * 12 <eos>", (0, False, NO_ANSWER)),
        ("7 * 12 84 4 <eos>", (0, False, NO_ANSWER)),
        ("<eos>", (0, False, NO_ANSWER)),
        ("7 + 7 14 <eos>", (0, False, NO_ANSWER)),  # one 7 only
        ("5 + 7 12 <eos>", (0, False, NO_ANSWER)),  # no 5
        ("7 * 12 84 7 + 84 91 <eos>", (0, False, NO_ANSWER)),  # the 7 is used up
        ("7 * 12 84 84 + 3 87 87 - 3 84 <eos>", (0, False, NO_ANSWER)),  # so is the 3
        ("3 - 4 0 <eos>", (0, False, NO_ANSWER)),  # a negative value cannot be written
        ("7 T 12 84 <eos>", (0, False, NO_ANSWER)),
    ],
)
def test_countdown_verifier(text, expected):
    assert judge((3, 7, 12, 4), 84, text) == expected


def test_countdown_verifier_agrees_with_a_slow_one():
    """Half of the demonstrations have a token changed at random; both verifiers say the
    same of each.
    """
    problems, tokens = COUNTDOWN.demonstrations(4000, "walk", tasks.generator(4))
    g = tasks.generator(5)
    where = torch.randint(tokens.shape[1], (len(tokens), 1), generator=g)
    spoilt = tokens.scatter(
        1, where, torch.randint(len(COUNTDOWN.words), where.shape, generator=g)
    )
    spoilt = torch.where(torch.rand(len(tokens), 1, generator=g) < 0.5, tokens, spoilt)
    verdict = COUNTDOWN.verify(problems, spoilt)
    assert 0.5 < verdict.valid.float().mean() < 0.95
    for problem, row, valid, answer in zip(
        problems.tolist(), spoilt.tolist(), *verdict[1:], strict=True
    ):
        expected = slowly(problem[:4], [COUNTDOWN.words[i] for i in row])
        assert (valid.item(), answer.item()) == (
            expected is not None,
            NO_ANSWER if expected is None else expected,
        )


def slowly(pool, words):
    """Return the final value of a valid response, else None."""
    if "<eos>" not in words:
        return None
    text = " ".join(words[: words.index("<eos>")])
    steps = re.findall(r"(\d+) ([+*-]) (\d+) (\d+)", text)
    if not steps or " ".join(" ".join(step) for step in steps) != text:
        return None
    pool = list(pool)
    for a, op, b, c in steps:
        for number in (int(a), int(b)):
            if number not in pool:
                return None
            pool.remove(number)
        if eval(f"{a}{op}{b}") != int(c):
            return None
        pool.append(int(c))
    return pool[-1]


def test_countdown_levels_are_the_fewest_steps():
    """By a search of all pools of numbers that one, two and three steps can leave."""
    for steps, level in enumerate(COUNTDOWN.levels, 1):
        for *numbers, target in COUNTDOWN.problems(level, 6, 0).tolist():
            reached = {0: {tuple(sorted(numbers))}}
            for depth in range(1, 4):
                reached[depth] = {
                    s for pool in reached[depth - 1] for s in pools_after(pool)
                }
            first = min(
                d
                for d in range(1, 4)
                if any(target in made for _, made in values(reached, d))
            )
            assert first == steps


def pools_after(pool):
    """Yield each pool that one step makes of a pool: two of its numbers become one."""
    for i, a in enumerate(pool):
        for j, b in enumerate(pool):
            for c in (a + b, a - b, a * b) if i != j else ():
                if 0 <= c <= 99:
                    yield tuple(
                        sorted([c, *(x for k, x in enumerate(pool) if k not in (i, j))])
                    )


def values(reached, depth):
    """Yield each pool before the last step, and the numbers that its last step makes."""
    for pool in reached[depth - 1]:
        made = {
            c
            for i, a in enumerate(pool)
            for j, b in enumerate(pool)
            if i != j
            for c in (a + b, a - b, a * b)
        }
        yield pool, made


def test_biased_demonstrations_prefer_plus():
    share = {}
    for style in ("walk", "biased"):
        _, tokens = COUNTDOWN.demonstrations(2000, style, tasks.generator(6))
        first = [COUNTDOWN.words[i] for i in tokens[:, 1].tolist()]
        share[style] = first.count("+") / len(first)
    assert share["biased"] > 0.7 > 0.5 > share["walk"]


# ---- the others by hand --------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "problem", "text", "expected"),
    [
        ("chain", [47, 26, -13, 0], "7 3 ; 6 0 ; 6 0 <eos>", (1, True, 60)),
        # only the last total is judged
        ("chain", [47, 26, -13, 0], "0 0 ; 0 0 ; 6 0 <eos>", (1, True, 60)),
        ("chain", [47, 26, -13, 0], "7 3 ; 6 0 ; 6 1 <eos>", (0, True, 61)),
        ("chain", [47, 26, -13, 0], "7 3 ; 6 0 ; 6 0 ;", (0, False, NO_ANSWER)),
        # modulo 100
        ("chain", [10, -26, -13, 0], "8 4 ; 7 1 ; 7 1 <eos>", (1, True, 71)),
        ("geometry", [2, 3, 0, 0, 2, 5, 3, 0, 0, 0], "6 10 16 <eos>", (1, True, 16)),
        ("geometry", [2, 3, 0, 0, 2, 5, 3, 0, 0, 1], "6 10 4 <eos>", (1, True, 4)),
        ("geometry", [2, 3, 0, 0, 2, 5, 3, 0, 1, 0], "10 14 24 <eos>", (1, True, 24)),
        ("geometry", [2, 3, 0, 0, 2, 5, 3, 0, 1, 0], "10 14 23 <eos>", (0, True, 23)),
        (
            "geometry",
            [2, 3, 0, 0, 2, 5, 3, 0, 1, 0],
            "10 14 24 24",
            (0, False, NO_ANSWER),
        ),
    ],
)
def test_other_verifiers(name, problem, text, expected):
    task = tasks.get(name)
    tokens = torch.tensor([[task.words.index(word) for word in text.split()]])
    verdict = task.verify(torch.tensor([problem]), tokens)
    assert (
        verdict.reward.item(),
        verdict.valid.item(),
        verdict.answer.item(),
    ) == expected


def test_a_picture_shows_its_rectangles():
    task = tasks.get("geometry")
    problems = task.problems("test", 20, 0)
    pictures = task.pictures(problems)
    red = (pictures[:, 0] > 0) & (pictures[:, 2] < 0)
    blue = (pictures[:, 2] > 0) & (pictures[:, 0] < 0)
    assert torch.equal(red.sum((1, 2)), problems[:, 0] * problems[:, 1] * 64)
    assert torch.equal(blue.sum((1, 2)), problems[:, 4] * problems[:, 5] * 64)


def test_mask_ends_with_the_first_eos():
    tokens = torch.tensor([[5, EOS, 7, EOS], [5, 6, 7, 8], [EOS, 0, 0, 0]])
    assert tasks.response_mask(tokens).int().tolist() == [
        [1, 1, 0, 0],
        [1, 1, 1, 1],
        [1, 0, 0, 0],
    ]


def test_unknown_task():
    with pytest.raises(InputError, match="there is no task named 'chess'"):
        tasks.get("chess")
