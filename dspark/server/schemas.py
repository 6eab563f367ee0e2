"""Requests as OpenAI's clients write them, and the engine's further sampling parameters beside."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    field_validator,
    model_validator,
)

Bias = Annotated[float, Field(strict=True, ge=-100, le=100, allow_inf_nan=False)]
Count = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
Positive = Annotated[int, Field(strict=True, ge=1, lt=2**31)]
Texts = Annotated[list[StrictStr], Field(fail_fast=True)]
"""As the other lists here, given up at its first wrong item: a body may hold half a million."""
Ids = Annotated[list[StrictInt], Field(fail_fast=True)]
_ID_DIGITS = 10
Penalty = Annotated[float, Field(strict=True, ge=-2, le=2, allow_inf_nan=False)]


class Strict(BaseModel):
    """Unknown fields are errors, so that no misspelt parameter is ignored; one that is null asks for nothing."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, values: Any) -> Any:
        """Clients send what they got: a message with ``refusal: null``, say. Null names nothing, known or not.

        Of unknown fields the first is enough to refuse all; a body may hold a hundred thousand.
        """
        if not isinstance(values, dict):
            return values
        known = {field.alias or name for name, field in cls.model_fields.items()}
        first = next((k for k, v in values.items() if v is not None and k not in known), None)
        return {k: v for k, v in values.items() if k in known or k == first}


class StreamOptions(Strict):
    """``include_usage`` sends a last chunk with the usage and no choice."""

    include_usage: StrictBool | None = None
    include_obfuscation: StrictBool | None = Field(None, description="Accepted and ignored.")


class JsonSchema(Strict):
    """A named JSON schema."""

    name: Annotated[StrictStr, Field(min_length=1, max_length=64)] | None = None
    description: StrictStr | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: StrictBool | None = None


class ResponseFormat(Strict):
    """Free text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Sampling(Strict):
    """What both kinds of completions take. Those below ``seed`` are the engine's own."""

    model: StrictStr = Field(min_length=1)
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    n: Positive | None = None
    temperature: Annotated[float, Field(strict=True, ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(strict=True, gt=0, le=1, allow_inf_nan=False)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Bias] | None = None
    stop: StrictStr | Texts | None = None
    seed: Annotated[int, Field(strict=True, ge=-(2**63), lt=2**64)] | None = None
    response_format: ResponseFormat | None = None
    user: StrictStr | None = Field(None, description="Accepted and ignored.")
    metadata: dict[str, Any] | None = Field(None, description="Accepted and ignored.")
    store: StrictBool | None = Field(None, description="Accepted and ignored; nothing is stored.")

    top_k: Count | None = None
    min_p: Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)] | None = None
    repetition_penalty: Annotated[float, Field(strict=True, ge=0.01, le=100, allow_inf_nan=False)] | None = None
    min_tokens: Count | None = None
    do_sample: StrictBool | None = None
    stop_token_ids: Annotated[list[Count], Field(fail_fast=True)] | None = None
    ignore_eos: StrictBool | None = None
    logprobs_mode: Literal["raw", "processed"] | None = None
    request_key: Annotated[int, Field(strict=True, ge=0, lt=2**64)] | None = None
    return_token_ids: StrictBool | None = Field(None, description="Adds token_ids to every choice.")

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _biases(cls, value: Any) -> Any:
        for key, bias in value.items() if isinstance(value, dict) else ():
            if not key.isascii() or not key.isdigit() or len(key) > _ID_DIGITS:
                raise ValueError(f"{key[: _ID_DIGITS + 1]!r} is no token id")
            if isinstance(bias, bool) or not isinstance(bias, (int, float)) or not -100 <= bias <= 100:
                raise ValueError(f"the bias of token {key} must be a number from -100 to 100")
        return value

    @field_validator("stop")
    @classmethod
    def _not_empty(cls, value: str | list[str] | None) -> str | list[str] | None:
        if value == "" or (isinstance(value, list) and "" in value):
            raise ValueError("an empty string stops nothing; leave it out")
        return value


class TextPart(Strict):
    """A part of a message. Only text can be read."""

    type: Literal["text"]
    text: StrictStr


class Message(Strict):
    """One turn of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: StrictStr | Annotated[list[TextPart], Field(fail_fast=True)]
    name: StrictStr | None = None
    tool_call_id: StrictStr | None = None


class ChatRequest(Sampling):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Count | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables of the chat template, such as enable_thinking."
    )


class CompletionRequest(Sampling):
    """``POST /v1/completions``."""

    prompt: StrictStr | Texts | Ids | Annotated[list[Ids], Field(fail_fast=True)]
    max_tokens: Positive | None = None
    logprobs: Count | None = None
    echo: StrictBool | None = Field(None, description="Puts the prompt's text before the output's.")
    best_of: Positive | None = Field(None, description="Must equal n.")
    suffix: None = Field(None, description="Not supported.")

    @field_validator("prompt")
    @classmethod
    def _some(cls, value: Any) -> Any:
        if len(value) == 0 or (isinstance(value, list) and isinstance(value[0], (str, list)) and not all(value)):
            raise ValueError("an empty prompt; give at least one token")
        return value


class ErrorBody(BaseModel):
    """What went wrong, and with which field."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """Every answer of status 400 and above."""

    error: ErrorBody
