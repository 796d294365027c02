"""The bodies of requests: OpenAI's fields, and those that `axon.serve.request.Sampling` has besides.

A field that is not here is refused; one that is here only as `None` is OpenAI's, and refused with a value.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    WrapValidator,
    model_validator,
)
from pydantic_core import CoreSchema

INT32 = 2**31 - 1
Id = Annotated[int, Field(ge=0, le=INT32)]


class Body(BaseModel):
    """Of the declared types exactly: no text is read as a number. Where there is a default, null is the default."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    @classmethod
    def _defaulted(cls) -> set[str]:
        """The names, as clients know them, of the fields that need not be given."""
        return {field.alias or name for name, field in cls.model_fields.items() if not field.is_required()}

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        defaulted = cls._defaulted()
        return {name: given for name, given in value.items() if given is not None or name not in defaulted}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema)["properties"]
        for name in cls._defaulted() & properties.keys():
            if properties[name].get("default") is not None:
                default = {"default": properties[name].pop("default")}
                properties[name] = {"anyOf": [properties[name], {"type": "null"}]} | default
        return schema


def either(wanted: str) -> WrapValidator:
    """For a union: one error in words, in place of one for each alternative."""

    def check(value: Any, inner: Callable[[Any], Any]) -> Any:
        try:
            return inner(value)
        except ValidationError:
            raise ValueError(f"must be {wanted}") from None

    return WrapValidator(check)


Text = Annotated[str, Field(min_length=1)]
Stop = Annotated[
    Text | Annotated[list[Text], Field(max_length=32)] | None,
    either("a text that is not empty, or a list of at most 32"),
]
Ids = Annotated[list[Id], Field(min_length=1)]
Texts = Annotated[list[str], Field(min_length=1)]
Prompt = Annotated[
    str | Texts | Ids | Annotated[list[Ids], Field(min_length=1)],
    either("a text, a list of texts, a list of ids, or a list of lists of ids, none of the lists empty"),
]
Bias = Annotated[float, Field(ge=-100, le=100)]


class StreamOptions(Body):
    """`include_usage`: whether the last event has the usage."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class JsonSchema(Body):
    """A schema by a name, as OpenAI wraps it."""

    name: str = "response"
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextFormat(Body):
    """Anything."""

    type: Literal["text"]


class JsonFormat(Body):
    """Any JSON object."""

    type: Literal["json_object"]


class SchemaFormat(Body):
    """JSON by a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class RegexFormat(Body):
    """A text that a regular expression matches as a whole."""

    type: Literal["regex"]
    regex: str


class GrammarFormat(Body):
    """A text of a context-free grammar, in Lark's notation."""

    type: Literal["grammar"]
    grammar: str


Format = Annotated[TextFormat | JsonFormat | SchemaFormat | RegexFormat | GrammarFormat, Discriminator("type")]


class Generation(Body):
    """Fields that a completion and a chat have in common."""

    model: str
    n: int = Field(1, ge=1, le=128)
    temperature: float = Field(1.0, ge=0, le=1e6)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=INT32, description="0 and -1: of all tokens, as in vLLM.")
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, ge=1e-6, le=1e6)
    logit_bias: dict[Annotated[str, Field(pattern=r"^[0-9]{1,10}$")], Bias] | None = None
    seed: int | None = Field(None, ge=-(2**63), le=2**64 - 1)
    stop: Stop = None
    stop_token_ids: Annotated[list[Id], Field(max_length=32)] | None = None
    min_tokens: int = Field(0, ge=0, le=INT32, description="Before an end or a stop text may come, as in vLLM.")
    ignore_eos: bool = Field(False, description="The model's own ends do not end the text, as in vLLM.")
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: Format | None = None
    priority: int = Field(0, ge=-INT32, le=INT32, description="The lower is served earlier, as in vLLM.")
    user: str | None = None
    """For the client's own books; nothing is done with it."""


class CompletionBody(Generation):
    """Of `/v1/completions`. `max_tokens`: 16 if not given; 0 with `echo` scores the prompt alone."""

    prompt: Prompt
    max_tokens: int | None = Field(None, ge=0, le=INT32)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False
    best_of: int | None = Field(None, ge=1, le=128, description="As n: no further texts are written to choose from.")
    suffix: Literal[""] | None = None


class TextPart(Body):
    """A part of a message; of other modalities there is none."""

    type: Literal["text"]
    text: str


class CalledFunction(Body):
    """`arguments`: JSON as text."""

    name: str
    arguments: str


class Call(Body):
    """A call that an earlier answer made."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class Message(Body):
    """Of a conversation. `tool_calls` are an assistant's, `tool_call_id` a tool's."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | list[TextPart] | None, either("a text, or a list of parts of the type text")] = None
    name: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None


class FunctionTool(Body):
    """`parameters`: a JSON schema of its arguments."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """Something that the model may call."""

    type: Literal["function"]
    function: FunctionTool


class FunctionName(Body):
    """Which."""

    name: str


class NamedTool(Body):
    """The one tool that is to be called."""

    type: Literal["function"]
    function: FunctionName


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedTool | None,
    either('"none", "auto", "required", or {"type": "function", "function": {"name": …}}'),
]


class Rendering(Body):
    """How a template writes a conversation, as vLLM names it. `add_generation_prompt`: None is true where the last
    message is not continued. `chat_template_kwargs`: what the template reads besides."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class ChatBody(Generation, Rendering):
    """Of `/v1/chat/completions`. `max_tokens` is the older name of `max_completion_tokens`; the last fields are
    OpenAI's, with those of their values that ask for nothing which is not done."""

    messages: list[Message] = Field(min_length=1)
    tools: list[Tool] | None = Field(None, max_length=128)
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: int | None = Field(None, ge=1, le=INT32)
    max_tokens: int | None = Field(None, ge=1, le=INT32)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    functions: None = None
    function_call: None = None
    store: Literal[False] = False
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    """For the client's own books, as `user`; so are the next two."""
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] = "auto"
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None = None
    verbosity: Literal["medium"] = "medium"
    audio: None = None
    prediction: None = None
    reasoning_effort: None = None
    web_search_options: None = None


class EmbeddingBody(Body):
    """Of `/v1/embeddings`. `base64`: of little-endian float32. `dimensions`: the first numbers alone, of a model that
    says that its embeddings may be cut."""

    model: str
    input: Prompt
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1, le=INT32)
    user: str | None = None


class LoadAdapterBody(Body):
    """Of `/v1/load_lora_adapter`, as in vLLM. `lora_path`: a location that the server reads. `load_inplace`: whether it
    may take the place of one that is loaded under its name; requests of that go on with it."""

    lora_name: str = Field(min_length=1, max_length=200)
    lora_path: str = Field(min_length=1)
    load_inplace: bool = False


class UnloadAdapterBody(Body):
    """Of `/v1/unload_lora_adapter`, as in vLLM: no more requests may name it, and those that run go on."""

    lora_name: str


class TokenizeBody(Rendering):
    """Of `/tokenize`: a text, or a conversation. `add_special_tokens`: whether those that open a prompt are added."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    add_special_tokens: bool = True


class DetokenizeBody(Body):
    """Of `/detokenize`."""

    model: str | None = None
    tokens: list[Id]
