"""Tiny random models that can be talked to: Kimi's kind of tokenizer, and chat templates of two kinds."""

from __future__ import annotations

from pathlib import Path

import rank_files
import tiny_models

ROLES = """
{%- macro turn(role, name) -%}
  {%- if role == 'user' -%}<|im_user|>
  {%- elif role == 'assistant' -%}<|im_assistant|>
  {%- else -%}<|im_system|>
  {%- endif -%}
  {{ name or role }}<|im_middle|>
{%- endmacro -%}
"""

# Every message stays as it was: a turn is an addition.
APPENDING = (
    ROLES
    + """
{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{%- endif -%}
{%- for message in messages -%}
  {{ turn(message.role, message.name) }}{{ message.content }}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}
"""
)

# Thoughts of earlier answers are blanked, and an answer begins inside its thoughts unless told otherwise.
THINKING = (
    ROLES
    + """
{%- if messages[0].role != 'system' -%}<|im_system|>system<|im_middle|>Be kind.<|im_end|>{%- endif -%}
{%- for message in messages -%}
  {{ turn(message.role, message.name) }}
  {%- if message.role == 'assistant' -%}<think></think>{%- endif -%}
  {{ message.content }}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}
  <|im_assistant|>assistant<|im_middle|>
  {%- if thinking is defined and not thinking -%}<think></think>{%- else -%}<think>{%- endif -%}
{%- endif -%}
"""
)

CONFIG = {**tiny_models.CONFIG, "vocab_size": 512, "eos_token_id": 257}


def write_folder(path: Path, template: str | None = APPENDING) -> Path:
    """A model folder whose ids are bytes and reserved slots."""
    rank_files.write_kimi(path)
    tiny_models.write_folder(path, CONFIG, tokenizer=False)
    if template is not None:
        (path / "chat_template.jinja").write_text(template, encoding="utf-8")
    return path
