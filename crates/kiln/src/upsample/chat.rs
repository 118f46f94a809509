//! An OpenAI-compatible chat service that rewrites prompts.
//!
//! The service is not trusted: its answer has a limited length, and the key goes to the named host only.

use std::sync::Arc;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use kiln_image::{Format, RgbImage};
use kiln_model::MAX_NEW_TOKENS;
use kiln_model::tokenizer::system_message;
use serde_json::{Value, json};
use ureq::Agent;
use ureq::config::RedirectAuthHeaders;

use crate::error::CliError;

/// The longest answer that is read, in bytes.
const MAX_ANSWER: u64 = 1 << 20;
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
        let url = url.trim_end_matches('/');
        let host = ["http://", "https://"].iter().find_map(|scheme| url.strip_prefix(scheme));
        if host.is_none_or(|host| host.is_empty() || host.contains(char::is_whitespace)) {
            return Err(CliError::usage(format!("`{url}` is not the address of a chat service"))
                .hint("such as --upsample-url http://localhost:8080/v1"));
        }
        let url = if url.ends_with(PATH) { url.to_owned() } else { format!("{url}{PATH}") };
        let key = KEYS.iter().find_map(|name| std::env::var(name).ok()).filter(|key| !key.is_empty());
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .redirect_auth_headers(RedirectAuthHeaders::SameHost)
            .timeout_global(Some(TIMEOUT))
            .user_agent(concat!("kiln/", env!("CARGO_PKG_VERSION")))
            .build();
        Ok(ChatService { agent: config.into(), url, model, key })
    }

    /// Rewrites a prompt, for an edit of these images.
    pub fn rewrite(
        &self,
        prompt: &str,
        images: &[Arc<RgbImage>],
        temperature: f32,
        seed: u64,
    ) -> Result<String, CliError> {
        let error = |what: String| {
            CliError::new(format!("the chat service at `{}` did not rewrite the prompt: {what}", self.url))
        };
        let check = "check --upsample-url, and that the service runs";
        let body = self.body(prompt, images, temperature, seed)?.to_string();
        let mut request = self.agent.post(&self.url).header("Content-Type", "application/json");
        if let Some(key) = &self.key {
            request = request.header("Authorization", format!("Bearer {key}"));
        }
        let mut response = request.send(body.as_bytes()).map_err(|e| error(e.to_string()).hint(check))?;
        let status = response.status().as_u16();
        let answer = response.body_mut().with_config().limit(MAX_ANSWER).read_to_vec();
        let answer = answer.map_err(|e| error(e.to_string()).hint(check))?;
        if status != 200 {
            let hint = match status {
                401 | 403 => "set its key in KILN_UPSAMPLE_KEY",
                404 => "check the address, and name the model with --upsample-model",
                400 | 422 => "name the model with --upsample-model; a model for edits must read images",
                _ => check,
            };
            return Err(error(format!("status {status}{}", reason(&answer))).hint(hint));
        }
        let answer: Value = serde_json::from_slice(&answer)
            .map_err(|e| error(format!("an invalid answer ({e})")).hint(check))?;
        let text = answer.pointer("/choices/0/message/content").and_then(Value::as_str).map(str::trim);
        let text = text.filter(|text| !text.is_empty());
        text.map(str::to_owned).ok_or_else(|| error("an answer without a text".into()).hint(check))
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
        let content = match edit {
            true => {
                content.push(json!({ "type": "text", "text": prompt }));
                Value::from(content)
            }
            false => prompt.into(),
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

/// What a service says about an error: the usual field, else the beginning of its answer.
fn reason(answer: &[u8]) -> String {
    let json = serde_json::from_slice::<Value>(answer).ok();
    let stated = json.as_ref().and_then(|json| {
        let error = json.get("error")?;
        error.get("message").unwrap_or(error).as_str().map(str::to_owned)
    });
    let text = stated.unwrap_or_else(|| String::from_utf8_lossy(answer).into_owned());
    let text: String = text.chars().filter(|c| !c.is_control()).take(200).collect();
    if text.trim().is_empty() { String::new() } else { format!(": {}", text.trim()) }
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
        for wrong in ["localhost:8080", "ftp://host", "http://", "https:// host"] {
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

    #[test]
    fn reasons_are_short_and_plain() {
        assert_eq!(reason(br#"{"error": {"message": "no such model"}}"#), ": no such model");
        assert_eq!(reason(br#"{"error": "busy"}"#), ": busy");
        assert_eq!((reason(b"a\x1b[31m\nb"), reason(b"")), (": a[31mb".into(), String::new()));
        assert!(reason(&[b'x'; 5000]).len() < 210);
    }
}
