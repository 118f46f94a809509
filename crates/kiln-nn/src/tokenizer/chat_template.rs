//! A model's own chat template, a Jinja program in `chat_template.jinja` or `tokenizer_config.json`.
//!
//! It is run once, as transformers runs it, for a message that marks its place: what is before and behind it is the template
//! of every prompt. A program that does more with a prompt than to copy it is refused.

use kiln_family::ChatArguments;
use minijinja::value::{Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind};
use serde_json::json;

/// Stands for the prompt. The spaces show whether it is trimmed.
const PROMPT: &str = "  \u{e000}prompt\u{e000}  ";
/// Stands for the date, which a default message may have.
const DATE: &str = "\u{e001}date\u{e001}";
/// Steps that a template may take; those of the published models take a few hundred.
const FUEL: u64 = 1_000_000;

/// The special tokens that a template may name.
pub(super) struct SpecialTokens<'a> {
    pub bos: Option<&'a str>,
    pub eos: Option<&'a str>,
    pub pad: Option<&'a str>,
}

/// Runs a template for one prompt, and returns what it puts before and behind it.
pub(super) fn around_prompt(
    template: &str,
    chat: &ChatArguments,
    tokens: &SpecialTokens<'_>,
) -> Result<[String; 2], String> {
    let refused = |problem: String| format!("the chat template is not supported: {problem}");
    let text = render(template, chat, tokens).map_err(|error| {
        let detail = error.detail().unwrap_or_default();
        let line = error.line().map(|line| format!(" in line {line}")).unwrap_or_default();
        refused(format!("{} {detail}{line}", error.kind()))
    })?;
    if text.contains(DATE) {
        return Err(refused("its text depends on the date".into()));
    }
    match &text.split(PROMPT).collect::<Vec<_>>()[..] {
        &[before, behind] => Ok([before.to_owned(), behind.to_owned()]),
        [_] if text.contains(PROMPT.trim()) => Err(refused("it changes the prompt".into())),
        [_] => Err(refused("it leaves out the prompt".into())),
        _ => Err(refused("it repeats the prompt".into())),
    }
}

/// Runs a template with the arguments of diffusers' pipelines.
fn render(template: &str, chat: &ChatArguments, tokens: &SpecialTokens<'_>) -> Result<String, Error> {
    let mut environment = Environment::new();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_fuel(Some(FUEL));
    environment
        .set_unknown_method_callback(|_, value, method, arguments| python_method(value, method, arguments));
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_function("strftime_now", |_: String| DATE);
    let text = |text: &str| json!([{ "type": "text", "text": text }]);
    let messages = match chat.system {
        None => json!([{ "role": "user", "content": PROMPT }]),
        Some(system) => json!([
            { "role": "system", "content": text(system) },
            { "role": "user", "content": text(PROMPT) },
        ]),
    };
    let mut context = json!({ "messages": messages, "tools": null, "documents": null });
    context["add_generation_prompt"] = chat.generation_prompt.into();
    if let Some(thinking) = chat.thinking {
        context["enable_thinking"] = thinking.into();
    }
    for (name, token) in [("bos_token", tokens.bos), ("eos_token", tokens.eos), ("pad_token", tokens.pad)] {
        if let Some(token) = token {
            context[name] = token.into();
        }
    }
    environment.template_from_str(template)?.render(Value::from_serialize(&context))
}

/// The methods of Python's texts and dictionaries that published templates call.
fn python_method(value: &Value, method: &str, arguments: &[Value]) -> Result<Value, Error> {
    let unknown = || Error::new(ErrorKind::UnknownMethod, format!("`{method}`"));
    let argument = arguments.first().and_then(Value::as_str);
    if let Some(text) = value.as_str() {
        let trimmed: &dyn Fn(char) -> bool =
            &|c| argument.map_or(c.is_whitespace(), |characters| characters.contains(c));
        return Ok(match (method, argument) {
            ("startswith", Some(start)) => text.starts_with(start).into(),
            ("endswith", Some(end)) => text.ends_with(end).into(),
            ("strip", _) => text.trim_matches(trimmed).into(),
            ("lstrip", _) => text.trim_start_matches(trimmed).into(),
            ("rstrip", _) => text.trim_end_matches(trimmed).into(),
            ("split", Some(separator)) => text.split(separator).map(Value::from).collect::<Value>(),
            ("lower", None) => text.to_lowercase().into(),
            ("upper", None) => text.to_uppercase().into(),
            ("replace", Some(old)) => {
                let new = arguments.get(1).and_then(Value::as_str).ok_or_else(unknown)?;
                text.replace(old, new).into()
            }
            _ => return Err(unknown()),
        });
    }
    match (value.kind(), method, argument) {
        (ValueKind::Map, "get", Some(key)) => {
            let found = value.get_attr(key)?;
            let default = arguments.get(1).cloned().unwrap_or(Value::from(()));
            Ok(if found.is_undefined() { default } else { found })
        }
        _ => Err(unknown()),
    }
}

#[cfg(test)]
mod tests {
    use kiln_family::flux2::{MISTRAL, QWEN3};

    use super::super::template::Template;
    use super::*;

    const NONE: SpecialTokens<'_> = SpecialTokens { bos: None, eos: None, pad: None };

    fn qwen3(template: &str) -> Result<[String; 2], String> {
        around_prompt(template, &QWEN3.chat, &NONE)
    }

    #[test]
    fn what_is_around_the_prompt_is_kept() {
        let one = "{% for m in messages %}<{{ m.role }}>{{ m['content'] }}{% if add_generation_prompt and not enable_thinking %}!{% endif %}{% endfor %}\n";
        assert_eq!(qwen3(one).unwrap(), ["<user>", "!"]);
        let reversed =
            "{% for m in messages[::-1] %}{{ m.content if m.content.startswith(' ') else '' }}{% endfor %}";
        assert_eq!(qwen3(reversed).unwrap(), ["", ""]);
        let tokens = SpecialTokens { bos: Some("<s>"), eos: Some("</s>"), pad: None };
        let two = "{{ bos_token }}{% if messages[0]['content'] is not string %}{{ messages[0].content[0].text[:7] }}{% endif %}|{{ messages[1].get('content')[0]['text'] }}{{ eos_token }}";
        let found = around_prompt(two, &MISTRAL.chat, &tokens).unwrap();
        assert_eq!(found, ["<s>You are|", "</s>"]);
    }

    #[test]
    fn what_can_not_be_followed_is_refused_by_name() {
        for (template, problem) in [
            ("{{ messages[0].content | trim }}", "changes the prompt"),
            ("{{ messages[0].content.strip() }}", "changes the prompt"),
            ("{{ messages[0].content }}{{ messages[0].content }}", "repeats the prompt"),
            ("hello", "leaves out the prompt"),
            ("{{ strftime_now('%Y') }}{{ messages[0].content }}", "depends on the date"),
            ("{{ raise_exception('only tools') }}", "only tools"),
            ("{{ messages[0].content.swapcase() }}", "swapcase"),
            ("{% if %}", "in line 1"),
            ("{% for a in range(9999) %}{% for b in range(9999) %}x{% endfor %}{% endfor %}", "fuel"),
        ] {
            let error = qwen3(template).unwrap_err();
            assert!(
                error.starts_with("the chat template is not supported") && error.contains(problem),
                "{error}"
            );
        }
    }

    #[test]
    fn the_built_in_templates_are_those_of_the_published_files() {
        // As in the files of Qwen3 and of Mistral Small 3, without the branches for tools.
        let qwen = "{%- for message in messages %}\n    {%- if message.role == \"user\" %}\n        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}\n    {%- endif %}\n{%- endfor %}\n{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n    {%- if enable_thinking is defined and enable_thinking is false %}\n        {{- '<think>\\n\\n</think>\\n\\n' }}\n    {%- endif %}\n{%- endif %}";
        let template = Template::of(&QWEN3);
        assert_eq!(qwen3(qwen).unwrap(), [template.start.into_owned(), template.end.into_owned()]);
        let mistral = "{%- set today = strftime_now(\"%Y-%m-%d\") %}\n{%- set default = \"It is \" + today %}\n\n{{- bos_token }}\n\n{%- set system_message = messages[0]['content'][0]['text'] %}\n{%- set loop_messages = messages[1:] %}\n{{- '[SYSTEM_PROMPT]' + system_message + '[/SYSTEM_PROMPT]' }}\n\n{%- for message in loop_messages %}\n    {{- '[INST]' }}\n    {%- for block in message['content'] %}\n        {{- block['text'] }}\n    {%- endfor %}\n    {{- '[/INST]' }}\n{%- endfor %}";
        let tokens = SpecialTokens { bos: Some("<s>"), ..NONE };
        let template = Template::of(&MISTRAL);
        let found = around_prompt(mistral, &MISTRAL.chat, &tokens).unwrap();
        assert_eq!(found, [template.start.into_owned(), template.end.into_owned()]);
    }
}
