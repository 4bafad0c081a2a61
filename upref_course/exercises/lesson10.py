# SPDX-License-Identifier: Apache-2.0
"""Lesson 10: six training runs. What is wrong with each?

Fill the hole, the line with `...`, then run `upref learn 10` in this folder. Each of
these six answers fits one run:

    "nothing"      nothing is wrong
    "sign"         the advantages have the wrong sign
    "no baseline"  the advantage is the reward plus 3, so above 0 for every answer: in
    lesson 2's terms, the noise wins
    "no signal"    hardly any answer is right
    "recomputed"   lp_old is computed anew before every update
    "temperature"  the trainer's log-probabilities are taken at another temperature than
    the sampler's

All runs: 32 prompts, groups of 8 answers, 8 updates with DAPO's objective on each
batch. pass@8: how likely one of 8 answers is right, on average; signal: the share of
groups that are neither all right nor all wrong; r: the largest of the batch, at the
first and at the last of the 8 updates; clipped: the share of tokens without a gradient.

run  batch  reward  entropy  pass@8  signal   r, first update   r, last update   clipped  gradient
A        0    0.08     1.78    0.37    0.41             1.443            1.506      0.32     0.050
A        8    0.21     1.88    0.59    0.59             1.448            1.647      0.64     0.036
A       16    0.28     1.85    0.67    0.72             1.485            1.515      0.76     0.029
A       24    0.32     1.87    0.73    0.75             1.493            1.548      0.87     0.024
A       32    0.35     1.87    0.76    0.75             1.465            1.573      0.92     0.018
A       40    0.36     1.87    0.77    0.75             1.477            1.477      0.92     0.015

B        0    0.08     1.78    0.37    0.41             1.000            1.431      0.15     0.141
B        8    0.08     1.42    0.34    0.38             1.000            1.506      0.15     0.138
B       16    0.11     0.92    0.27    0.28             1.000            1.482      0.07     0.106
B       24    0.12     0.58    0.21    0.22             1.000            1.465      0.06     0.082
B       32    0.13     0.42    0.19    0.22             1.000            1.423      0.04     0.068
B       40    0.14     0.32    0.18    0.09             1.000            1.423      0.03     0.057

C        0    0.08     1.78    0.37    0.41             1.000            1.373      0.07     0.039
C        8    0.27     1.66    0.57    0.53             1.000            1.386      0.12     0.047
C       16    0.48     1.25    0.67    0.53             1.000            1.348      0.09     0.042
C       24    0.58     1.04    0.73    0.41             1.000            1.377      0.09     0.036
C       32    0.67     0.85    0.78    0.38             1.000            1.260      0.08     0.032
C       40    0.72     0.68    0.80    0.31             1.000            1.313      0.07     0.024

D        0    0.08     1.78    0.37    0.41             1.000            1.000      0.00     0.046
D        8    0.34     1.54    0.60    0.59             1.000            1.000      0.00     0.066
D       16    0.55     1.06    0.70    0.38             1.000            1.000      0.00     0.046
D       24    0.66     0.84    0.77    0.28             1.000            1.000      0.00     0.046
D       32    0.73     0.64    0.81    0.38             1.000            1.000      0.00     0.047
D       40    0.80     0.48    0.85    0.22             1.000            1.000      0.00     0.038

E        0    0.00     1.67    0.00    0.00             1.000            1.000      0.00     0.000
E        8    0.00     1.67    0.00    0.00             1.000            1.000      0.00     0.000
E       16    0.00     1.67    0.00    0.00             1.000            1.000      0.00     0.000
E       24    0.00     1.67    0.00    0.00             1.000            1.000      0.00     0.000
E       32    0.00     1.67    0.00    0.00             1.000            1.000      0.00     0.000
E       40    0.00     1.67    0.00    0.00             1.000            1.000      0.00     0.000

F        0    0.08     1.78    0.37    0.41             1.000            1.298      0.06     0.036
F        8    0.04     1.69    0.24    0.25             1.000            1.115      0.03     0.026
F       16    0.02     1.62    0.17    0.22             1.000            1.125      0.04     0.023
F       24    0.02     1.56    0.13    0.16             1.000            1.139      0.04     0.019
F       32    0.01     1.52    0.11    0.22             1.000            1.060      0.05     0.021
F       40    0.01     1.48    0.09    0.09             1.000            1.042      0.04     0.014
"""


def diagnosis(run):
    """Return what is wrong with a run.

    Args:
        run: "A" ... "F".

    Returns:
        One of the six answers above.
    """
    return ...  # {"A": "nothing", "B": "nothing", "C": ..., and so on}[run]


if __name__ == "__main__":  # `python lesson10.py` tries it
    for run in "ABCDEF":
        print(run, diagnosis(run))
