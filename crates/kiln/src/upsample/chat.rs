//! An OpenAI-compatible chat service that rewrites prompts.
//!
//! The service is not trusted: its answer has a limited length, and redirects are not followed, so that prompt, images and
//! key go to the named address only. The key is never shown, even if the service repeats it.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use kiln_base::printable_line;
use kiln_engine::{InputResolver, Request};
use kiln_image::{Format, RgbImage};
use kiln_nn::MAX_NEW_TOKENS;
use kiln_nn::tokenizer::system_message;
use serde_json::{Value, json};
use ureq::Agent;
use ureq::http::Uri;

use crate::error::CliError;

/// The longest answer that is read, in bytes.
const MAX_ANSWER: u64 = 1 << 20;
/// The longest prompt that is accepted, in bytes: far more than [`MAX_NEW_TOKENS`] have.
const MAX_PROMPT: usize = 16 << 10;
/// The longest reason that is passed on, in characters.
const MAX_REASON: usize = 200;
/// How often a waiting request asks whether to go on.
const POLL: Duration = Duration::from_millis(20);
/// How long an answer may take: a large model on a slow machine writes a page in minutes.
const TIMEOUT: Duration = Duration::from_secs(600);
/// Images with more pixels are shrunk before they are sent.
const MAX_AREA: u64 = 768 * 768;
const KEYS: [&str; 2] = ["KILN_UPSAMPLE_KEY", "OPENAI_API_KEY"];
const PATH: &str = "/chat/completions";

/// A service at an address.
pub struct ChatService {
    agent: Agent,
    url: String,
    model: Option<String>,
    key: Option<String>,
}

impl ChatService {
    /// A service at `url`, with or without the path of its chat; `model` is the name of a model there.
    pub fn new(url: &str, model: Option<String>) -> Result<ChatService, CliError> {
        let key = KEYS.iter().find_map(|name| std::env::var(name).ok()).filter(|key| !key.is_empty());
        ChatService::with_key(url, model, key, TIMEOUT)
    }

    pub(super) fn with_key(
        url: &str,
        model: Option<String>,
        key: Option<String>,
        timeout: Duration,
    ) -> Result<ChatService, CliError> {
        let url = url.trim_end_matches('/');
        let host = ["http://", "https://"].iter().find_map(|scheme| url.strip_prefix(scheme));
        let is_address =
            host.is_some() && url.parse::<Uri>().is_ok_and(|uri| uri.host().is_some_and(|h| !h.is_empty()));
        if !is_address {
            return Err(CliError::usage(format!("`{url}` is not the address of a chat service"))
                .hint("such as --upsample-url http://localhost:8080/v1"));
        }
        // It would be in messages and logs.
        if host.is_some_and(|host| host.split('/').next().is_some_and(|host| host.contains('@'))) {
            return Err(CliError::usage("the address of a chat service can't contain a password")
                .hint("set its key in KILN_UPSAMPLE_KEY"));
        }
        let url = if url.ends_with(PATH) { url.to_owned() } else { format!("{url}{PATH}") };
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .timeout_global(Some(timeout))
            .user_agent(concat!("kiln/", env!("CARGO_PKG_VERSION")))
            .build();
        Ok(ChatService { agent: config.into(), url, model, key })
    }

    /// Rewrites the prompts of a request: prompt `i` with the first seed plus `i`.
    pub fn rewrite(
        &self,
        request: &mut Request,
        temperature: f32,
        inputs: &dyn InputResolver,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<(), CliError> {
        let images = request.references.iter().map(|file| Ok(inputs.image(&file.path)?.image));
        let images = images.collect::<Result<Vec<_>, CliError>>()?;
        let first = request.seed.first().copied().unwrap_or(0);
        let mut rewritten = Vec::with_capacity(request.prompts.len());
        for (prompt, i) in request.prompts.iter().zip(0u64..) {
            let body = self.body(prompt, &images, temperature, first.wrapping_add(i))?.to_string();
            let answer = self.ask(body, go_on)?;
            rewritten.push(answer.and_then(|(status, answer)| self.text(status, &answer)).map_err(
                |problem| {
                    let what = format!("the chat service at `{}` did not rewrite the prompt", self.url);
                    CliError::new(format!("{what}: {}", problem.what)).hint(problem.hint)
                },
            )?);
        }
        request.original_prompts = std::mem::replace(&mut request.prompts, rewritten);
        Ok(())
    }

    /// Sends a request. Returns the status and the answer.
    pub(super) fn ask(
        &self,
        body: String,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<Result<(u16, Vec<u8>), Problem>, CliError> {
        let (agent, url, key) = (self.agent.clone(), self.url.clone(), self.key.clone());
        let (sender, receiver) = channel();
        // On a thread of its own, so that the caller can stop. It ends with its own timeout.
        std::thread::spawn(move || {
            let mut request = agent.post(&url).header("Content-Type", "application/json");
            if let Some(key) = &key {
                request = request.header("Authorization", format!("Bearer {key}"));
            }
            let answer = request.send(body.as_bytes()).and_then(|mut response| {
                let status = response.status().as_u16();
                Ok((status, response.body_mut().with_config().limit(MAX_ANSWER).read_to_vec()?))
            });
            let _ = sender.send(answer.map_err(|error| Problem { what: describe(&error), hint: CHECK }));
        });
        loop {
            if !go_on() {
                return Err(CliError::cancelled());
            }
            match receiver.recv_timeout(POLL) {
                Ok(answer) => return Ok(answer),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    return Ok(Err(Problem { what: "its thread ended early".into(), hint: CHECK }));
                }
            }
        }
    }

    fn body(
        &self,
        prompt: &str,
        images: &[Arc<RgbImage>],
        temperature: f32,
        seed: u64,
    ) -> Result<Value, CliError> {
        let mut content = Vec::new();
        for image in images {
            let image = kiln_image::shrink_to(image, MAX_AREA);
            let png = kiln_image::encode(&image, Format::Png, None)?;
            let url = format!("data:image/png;base64,{}", STANDARD.encode(png));
            content.push(json!({ "type": "image_url", "image_url": { "url": url } }));
        }
        let edit = !content.is_empty();
        let content = if edit {
            content.push(json!({ "type": "text", "text": prompt }));
            Value::from(content)
        } else {
            prompt.into()
        };
        let mut body = json!({
            "messages": [
                { "role": "system", "content": system_message(edit) },
                { "role": "user", "content": content },
            ],
            "temperature": temperature,
            "max_tokens": MAX_NEW_TOKENS,
            // Some services take signed numbers only.
            "seed": seed & (u64::MAX >> 1),
        });
        if let Some(model) = &self.model {
            body["model"] = model.as_str().into();
        }
        Ok(body)
    }
}

/// What to do if a service does not work.
const CHECK: &str = "check --upsample-url, and that the service runs";

/// What a service did wrong, and what to do about it.
#[derive(Debug)]
pub(super) struct Problem {
    pub what: String,
    pub hint: &'static str,
}

/// Describes why there is no answer.
fn describe(error: &ureq::Error) -> String {
    match error {
        ureq::Error::BodyExceedsLimit(_) => format!("an answer of more than {} MiB", MAX_ANSWER >> 20),
        ureq::Error::Timeout(_) => "no whole answer in time".into(),
        error => error.to_string(),
    }
}

impl ChatService {
    /// The prompt in an answer.
    pub(super) fn text(&self, status: u16, answer: &[u8]) -> Result<String, Problem> {
        let problem = |what: String| Problem { what, hint: CHECK };
        if status != 200 {
            let hint = match status {
                300..400 => "redirects are not followed: name the address that it redirects to",
                401 | 403 => "set its key in KILN_UPSAMPLE_KEY",
                404 => "check the address, and name the model with --upsample-model",
                400 | 422 => "name the model with --upsample-model; a model for edits must read images",
                _ => CHECK,
            };
            return Err(Problem { what: format!("status {status}{}", self.reason(answer)), hint });
        }
        let answer: Value = serde_json::from_slice(answer)
            .map_err(|error| problem(format!("an invalid answer ({error})")))?;
        let message = &answer["choices"][0]["message"];
        let stated = |name: &str| message[name].as_str().map(str::trim).filter(|text| !text.is_empty());
        let Some(text) = stated("content") else {
            let refusal = stated("refusal").map(|why| format!("it refuses: {}", self.short(why)));
            return Err(problem(refusal.unwrap_or_else(|| "an answer without a text".into())));
        };
        if text.len() > MAX_PROMPT {
            return Err(problem(format!("an answer of {} bytes, too long for a prompt", text.len())));
        }
        // It would be in the image's recipe.
        if self.key.as_deref().is_some_and(|key| text.contains(key)) {
            return Err(problem("an answer with the service's key in it".into()));
        }
        Ok(text.to_owned())
    }

    /// What a service says about an error: the usual field, else the beginning of its answer.
    fn reason(&self, answer: &[u8]) -> String {
        let json = serde_json::from_slice::<Value>(answer).ok();
        let stated = json.as_ref().and_then(|json| {
            let error = json.get("error")?;
            error.get("message").unwrap_or(error).as_str().map(str::to_owned)
        });
        let text = stated.unwrap_or_else(|| String::from_utf8_lossy(answer).into_owned());
        let text = self.short(&text);
        if text.is_empty() { text } else { format!(": {text}") }
    }

    /// The beginning of a text, without control characters and without the key.
    fn short(&self, text: &str) -> String {
        let text = match &self.key {
            Some(key) => text.replace(key, "…"),
            None => text.to_owned(),
        };
        let text: String = text.chars().filter(|c| !c.is_control()).take(MAX_REASON).collect();
        printable_line(text.trim()).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_needs_no_path() {
        for url in ["http://localhost:8080/v1", "http://localhost:8080/v1/chat/completions/"] {
            let service = ChatService::new(url, None).unwrap();
            assert_eq!(service.url, "http://localhost:8080/v1/chat/completions");
        }
        for wrong in [
            "localhost:8080",
            "ftp://host",
            "http://",
            "https:// host",
            "http://me:secret@host/v1",
            "http:///v1",
        ] {
            assert!(ChatService::new(wrong, None).is_err(), "{wrong}");
        }
    }

    #[test]
    fn images_go_before_the_prompt() {
        let service = ChatService::new("http://localhost", Some("mistral".into())).unwrap();
        let words = service.body("a cat", &[], 0.5, u64::MAX).unwrap();
        assert_eq!((&words["messages"][1]["content"], &words["model"]), (&json!("a cat"), &json!("mistral")));
        assert!(words["messages"][0]["content"].as_str().unwrap().contains("prompt engineer"));
        let image = Arc::new(RgbImage::black(4, 4));
        let edit = service.body("a cat", &[image], 0.5, 1).unwrap();
        let content = edit["messages"][1]["content"].as_array().unwrap();
        assert!(content[0]["image_url"]["url"].as_str().unwrap().starts_with("data:image/png;base64,"));
        assert_eq!((&content[1]["text"], content.len()), (&json!("a cat"), 2));
        assert!(edit["messages"][0]["content"].as_str().unwrap().contains("image-editing"));
    }
}
