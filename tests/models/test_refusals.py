"""Shapes that models cannot have: each is refused by the names of its fields."""

import pytest

from axon.errors import UserError
from models.bert import Bert
from models.deepseek import DeepSeek
from models.gemma import Gemma
from models.gpt2 import GPT2
from models.gpt_oss import GptOss
from models.llama import Llama
from models.olmo import Olmo
from models.vit import ViT

SIZES = {"embed": 24, "layers": 2, "heads": 4, "mlp": 32}
TEXT = SIZES | {"vocab": 40}
GROUPED = TEXT | {"kv_heads": 2}
WINDOWED = GROUPED | {"head_dim": 6, "window": 5}
WRONG = [
    (Llama, GROUPED | {"layers": 0}, "Llama.layers is 0; must be at least 1"),
    (Llama, GROUPED | {"head_dim": 0}, "Llama.head_dim is 0; must be at least 1, or None"),
    (Llama, GROUPED | {"window": 0}, "Llama.window is 0; must be at least 1, or None"),
    (Llama, GROUPED | {"norm_eps": 1e400}, "Llama.norm_eps is inf; must be in [0, inf)"),
    (Llama, GROUPED | {"vocab": 2**31}, "Llama.vocab is 2147483648; must be in [1, 2**31)"),
    (Llama, GROUPED | {"embed": 26}, "Llama: embed 26 is not divisible by heads 4; set head_dim"),
    (Llama, GROUPED | {"head_dim": 5}, "Llama: head_dim 5 is odd"),
    (Llama, GROUPED | {"kv_heads": 3}, "Llama: heads 4 is not a multiple of kv_heads 3"),
    (Olmo, GROUPED | {"window": 0}, "Olmo.window is 0; must be at least 1, or None"),
    (Olmo, GROUPED | {"local_layers": 0}, "Olmo.local_layers is 0; must be at least 1"),
    (Olmo, GROUPED | {"kv_heads": 3}, "Olmo: heads 4 is not a multiple of kv_heads 3"),
    (Gemma, WINDOWED | {"window": 0}, "Gemma.window is 0; must be at least 1"),
    (Gemma, WINDOWED | {"soft_cap": 0.0}, "Gemma.soft_cap is 0.0; must be above 0, or None"),
    (Gemma, WINDOWED | {"head_dim": 5}, "Gemma: head_dim 5 is odd"),
    (Gemma, WINDOWED | {"kv_heads": 3}, "Gemma: heads 4 is not a multiple of kv_heads 3"),
    (GptOss, GROUPED | {"window": 0}, "GptOss.window is 0; must be at least 1"),
    (GptOss, GROUPED | {"layers": 3}, "GptOss: layers 3 is odd"),
    (GptOss, GROUPED | {"head_dim": 5}, "GptOss: head_dim 5 is odd"),
    (GptOss, GROUPED | {"kv_heads": 3}, "GptOss: heads 4 is not a multiple of kv_heads 3"),
    (DeepSeek, TEXT | {"first_dense": 2, "kv_latent": 0}, "DeepSeek.kv_latent is 0; must be at least 1"),
    (DeepSeek, TEXT | {"first_dense": 2, "rope_dim": 5}, "DeepSeek: rope_dim 5 is odd"),
    (DeepSeek, TEXT | {"first_dense": 3}, "DeepSeek: first_dense 3 is more than layers 2"),
    (GPT2, TEXT | {"heads": 5}, "GPT2: embed 24 is not divisible by heads 5"),
    (GPT2, TEXT | {"dropout": 1.0}, "GPT2.dropout is 1.0; must be in [0, 1)"),
    (GPT2, TEXT | {"positions": 0}, "GPT2.positions is 0; must be at least 1"),
    (GPT2, TEXT | {"norm_eps": -1e-5}, "GPT2.norm_eps is -1e-05; must be at least 0"),
    (Bert, TEXT | {"types": 0}, "Bert.types is 0; must be at least 1"),
    (Bert, TEXT | {"dropout": 1.0}, "Bert.dropout is 1.0; must be in [0, 1)"),
    (Bert, TEXT | {"embed": 26}, "Bert: embed 26 is not divisible by heads 4"),
    (ViT, SIZES | {"classes": 1}, "ViT.classes is 1; must be at least 2"),
    (ViT, SIZES | {"image": 8, "patch": 3}, "ViT: image 8 is not divisible by patch 3"),
    (ViT, SIZES | {"embed": 18}, "ViT: embed 18 is not divisible by heads 4"),
    (ViT, SIZES | {"pool": "max"}, "ViT.pool is 'max'; must be 'token' or 'mean'"),
]


@pytest.mark.parametrize(("model", "fields", "message"), WRONG, ids=[message for *_, message in WRONG])
def test_a_shape_that_is_none_is_refused(model, fields, message):
    with pytest.raises(UserError) as caught:
        model(**fields)
    assert message in str(caught.value)
