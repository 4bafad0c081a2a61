# SPDX-License-Identifier: Apache-2.0
"""What students write before they are right: a line of the solution, what stands in its place, and words of the answer
that name the mistake. The first of a lesson is only another way to be right: (line, another) without words."""

ATTEMPTS: dict[int, list[tuple[str, str, str]]] = {
    1: [
        ("-(reward * log_prob[action]).mean()", "(-log_prob[action] * reward).sum() / len(action)", ""),
        ("-(reward * log_prob[action]).mean()", "(reward * log_prob[action]).mean()", "the sign"),
        ("-(reward * log_prob[action]).mean()", "-(reward * log_prob[action].exp()).mean()", "π itself where log π"),
        ("-(reward * log_prob[action]).mean()", "-(reward * logits[action]).mean()", "logits where log π belongs"),
        ("-(reward * log_prob[action]).mean()", "-torch.dot(reward, log_prob[action])", "the sum over the samples"),
        ("-(reward * log_prob[action]).mean()", "-(reward[:, None] * log_prob).mean()", "every action is pushed"),
        ("-(reward * log_prob[action]).mean()", "torch.nn.NLLLoss()(log_prob.expand(len(action), -1), action)",
         "the reward is left out"),
        ("-(reward * log_prob[action]).mean()", "-reward * log_prob[action]", "it returns 2 numbers"),
        ("-(reward * log_prob[action]).mean()", "-(reward * log_prob[action].detach()).mean()", "no gradient"),
        ("-(reward * log_prob[action]).mean()", "-3 * (reward * log_prob[action]).mean()", "3 times what it should be"),
        ("torch.log_softmax(logits, dim=0)", "torch.log_softmax(torch.softmax(logits, 0), 0)", "the softmax twice"),
        ("-(reward * log_prob[action]).mean()", "print(reward * log_prob[action])", "it returns nothing"),
    ],
    2: [
        ("rewards[here].std()", "rewards[here].var().sqrt()", ""),
        ("(rewards[here] - rewards[here].mean()) / ", "rewards[here] / ", "there is no baseline"),
        ("rewards[here].mean()", "rewards.mean()", "though each has its own deviation"),
        ("here = group == g", "here = torch.ones_like(group, dtype=torch.bool)", "one mean for all prompts"),
        (" / (rewards[here].std() + 1e-6)", "", "nothing is divided"),
        ("rewards[here].std() + 1e-6", "rewards[here].std()", "0/0"),
        ("rewards[here].std()", "rewards[here].std(correction=0)", "divides by G, not by G - 1"),
        ("rewards[here].std()", "rewards[here].var()", "the variance where the standard deviation"),
        ("rewards[here].std()", "rewards.std()", "the deviation of all prompts"),
        ("rewards[here] - rewards[here].mean()", "rewards[here].mean() - rewards[here]", "the sign"),
        ("rewards[here].std() + 1e-6", "rewards[here].std() + 0.1", "times what it should be"),
    ],
    3: [
        ("-(torch.exp(lp - lp_old) * A).mean()", "-((lp - lp_old).exp().detach() * lp * A).mean()", ""),
        ("-(torch.exp(lp - lp_old) * A).mean()", "(torch.exp(lp - lp_old) * A).mean()", "the sign"),
        ("-(torch.exp(lp - lp_old) * A).mean()", "-((lp - lp_old) * A).mean()", "there is no ratio"),
        ("torch.exp(lp - lp_old)", "torch.exp(lp - lp.detach())", "there is no ratio"),
        ("lp - lp_old", "lp_old - lp", "upside down"),
        ("torch.exp(lp - lp_old)", "(lp / lp_old)", "a ratio of logarithms"),
        ("torch.exp(lp - lp_old)", "lp.exp()", "π_old is left out"),
        ("torch.exp(lp - lp_old)", "torch.exp(lp - lp_old) * lp", "both carry a gradient"),
        (").mean()", ").sum()", "the sum over the samples"),
        ("torch.exp(lp - lp_old)", "torch.exp(lp - lp_old).detach()", "no gradient"),
        ("torch.exp(lp - lp_old)", "torch.exp(lp - lp_old).clamp(max=3.5)", "you are right on the 3 smaller batches"),
    ],
}  # fmt: skip
