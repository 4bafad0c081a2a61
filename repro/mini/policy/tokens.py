# SPDX-License-Identifier: Apache-2.0
"""A task's words as a transformers tokenizer: one word, one token; `"3 7 12 4 T 57"`
becomes <bos> and six ids.
"""

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from repro.mini.tasks import BOS, SPECIAL, Task


def tokenizer(task: Task) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a task, which has the words of its vocabulary and no
    others.

    It raises an error on any other word, and writes <bos> in front of a text.
    """
    pad, eos, bos = SPECIAL
    # without an unknown-word token a word outside the vocabulary is an error
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(task.words)}))
    words.pre_tokenizer = WhitespaceSplit()
    words.post_processor = TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, BOS)]
    )
    # a processor writes <|image_pad|> nine times without a space between: only special
    # tokens are found there
    pictures = [word for word in task.words if word.startswith("<|")]
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token=pad,
        eos_token=eos,
        bos_token=bos,
        **({"additional_special_tokens": pictures} if pictures else {}),
        model_max_length=task.prompt_length + task.response_length,
        clean_up_tokenization_spaces=False,
    )
