"""Requests as OpenAI's clients write them, and the engine's further sampling parameters beside."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, field_validator, model_validator

Bias = Annotated[float, Field(strict=True, ge=-100, le=100, allow_inf_nan=False)]
Count = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
Positive = Annotated[int, Field(strict=True, ge=1, lt=2**31)]
_ID_DIGITS = 10
Penalty = Annotated[float, Field(strict=True, ge=-2, le=2, allow_inf_nan=False)]


class Strict(BaseModel):
    """Unknown fields are errors, so that no misspelt parameter is ignored; one that is null asks for nothing."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, values: Any) -> Any:
        """Clients send what they got: a message with ``refusal: null``, say. Null names nothing, known or not."""
        if not isinstance(values, dict):
            return values
        return {k: v for k, v in values.items() if v is not None or k in cls.model_fields}


class StreamOptions(Strict):
    """``include_usage`` sends a last chunk with the usage and no choice."""

    include_usage: StrictBool = False
    include_obfuscation: StrictBool | None = Field(None, description="Accepted and ignored.")


class JsonSchema(Strict):
    """A named JSON schema."""

    name: StrictStr = Field("schema", min_length=1, max_length=64)
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
    stop: StrictStr | list[StrictStr] | None = None
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
    stop_token_ids: list[Count] | None = None
    ignore_eos: StrictBool | None = None
    logprobs_mode: Literal["raw", "processed"] | None = None
    request_key: Annotated[int, Field(strict=True, ge=0, lt=2**64)] | None = None
    return_token_ids: StrictBool | None = Field(None, description="Adds token_ids to every choice.")

    @field_validator("logit_bias")
    @classmethod
    def _ids(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for key in value or {}:
            if not key.isascii() or not key.isdigit() or len(key) > _ID_DIGITS:
                raise ValueError(f"{key[: _ID_DIGITS + 1]!r} is no token id")
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
    content: StrictStr | list[TextPart]
    name: StrictStr | None = None
    tool_call_id: StrictStr | None = None


class ChatRequest(Sampling):
    """``POST /v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Count | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables of the chat template, such as enable_thinking."
    )


class CompletionRequest(Sampling):
    """``POST /v1/completions``."""

    prompt: StrictStr | list[StrictStr] | list[StrictInt] | list[list[StrictInt]]
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
