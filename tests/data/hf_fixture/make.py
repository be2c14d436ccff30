"""Makes this folder: a tiny DeepSeek-V3 checkpoint saved by transformers, a tokenizer and the logits that
transformers computes for text.txt. Run by hand, with torch and transformers (5.x) installed::

    PYTHONPATH=python python tests/data/hf_fixture/make.py

The tests read the folder and need neither. The model is random but not meek: every part of the architecture
that an engine can get wrong moves its logits by far more than the tests tolerate. Latents are small, so
that the eps of their norms counts; mscale and mscale_all_dim differ, so that the two YaRN corrections
cannot be mistaken for each other; the text is longer than the original context; the router's bias is as
large as the gaps between its scores. Weights are bf16 except the router (which transformers keeps in f32),
in two shards.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import tokenizers
import torch
import transformers

from kdtree_engine import kdtr

HERE = Path(__file__).parent
BOS, EOS = "<|begin|>", "<|end|>"
VOCAB = 320
POSITIONS_APART = 6  # of the positions whose logits are kept
NEW_TOKENS = 32
SMALL = 0.003  # makes the mean square of a latent about ten times the eps of its norm
LEAST_GAP = 1e-3  # between the best and the second-best logit of each generated token


def make_tokenizer(text: str) -> tokenizers.Tokenizer:
    t = tokenizers.Tokenizer(tokenizers.models.BPE())
    t.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB - 2,
        special_tokens=[BOS, EOS],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    t.train_from_iterator([text], trainer)
    t.add_tokens([tokenizers.AddedToken("<think>", special=False)])
    t.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, t.token_to_id(BOS))]
    )
    return t


def make_model() -> transformers.DeepseekV3ForCausalLM:
    config = transformers.DeepseekV3Config(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_shared_experts=1,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=1,
        topk_group=1,
        q_lora_rank=20,
        kv_lora_rank=24,
        qk_nope_head_dim=12,
        qk_rope_head_dim=16,
        v_head_dim=12,
        first_k_dense_replace=1,
        routed_scaling_factor=2.827,
        norm_topk_prob=True,
        max_position_embeddings=1024,
        rms_norm_eps=1e-5,
        rope_theta=50000.0,
        rope_scaling={
            "type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 0.8,
            "mscale_all_dim": 1.2,
        },
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        num_nextn_predict_layers=0,
        attn_implementation="eager",
    )
    model = transformers.DeepseekV3ForCausalLM(config)
    rng = np.random.default_rng(20260101)
    with torch.no_grad():
        for name, p in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name:
                continue
            x = rng.standard_normal(tuple(p.shape))
            if name.endswith("bias"):
                x = 0.1 * x
            elif "norm" in name:
                x = 1 + 0.2 * x
            else:
                x = 0.8 * x / np.sqrt(p.shape[-1])
                if "q_a_proj" in name or "kv_a_proj" in name:
                    x[: p.shape[0] - (config.qk_rope_head_dim if "kv_a" in name else 0)] *= SMALL
            p.copy_(torch.from_numpy(x).float())
    return model.eval()


def main() -> None:
    text = (HERE / "text.txt").read_text(encoding="utf-8")
    tokenizer = make_tokenizer(text)
    tokenizer.save(str(HERE / "tokenizer.json"))
    for old in HERE.glob("model*"):
        old.unlink()
    with tempfile.TemporaryDirectory() as folder:
        make_model().save_pretrained(folder)
        half = transformers.DeepseekV3ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        half.save_pretrained(HERE, max_shard_size="110KB")
    model = transformers.DeepseekV3ForCausalLM.from_pretrained(
        HERE, dtype=torch.float32, attn_implementation="eager"
    )
    model.float().eval()
    tokens = torch.tensor([tokenizer.encode(text).ids])
    with torch.no_grad():
        logits = model(tokens).logits[0]
        run = model.generate(
            tokens,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
    best = torch.stack(run.logits)[:, 0].topk(2).values
    gap = float((best[:, 0] - best[:, 1]).min())
    if gap < LEAST_GAP:
        sys.exit(f"a generated token has a gap of {gap:g}: choose another seed")
    positions = np.arange(POSITIONS_APART - 1, tokens.shape[1], POSITIONS_APART)
    kdtr.write(
        HERE / "expected.kdtr",
        {
            "tokens": tokens[0].numpy().astype(np.int32),
            "positions": positions.astype(np.int32),
            "logits": logits.numpy()[positions],
            "argmax": logits.argmax(-1).numpy().astype(np.int32),
            "greedy": run.sequences[0, tokens.shape[1] :].numpy().astype(np.int32),
        },
    )
    size = sum(f.stat().st_size for f in HERE.iterdir())
    about = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "tokens": tokens.shape[1],
        "largest_logit": float(logits.abs().max()),
        "smallest_gap": gap,
        "bytes": size,
    }
    print(json.dumps(about, indent=1))


if __name__ == "__main__":
    main()
