//! A check by an HTTP service: image and prompt as a form, the answer as JSON.

use std::sync::mpsc::channel;

use serde::Deserialize;
use ureq::Agent;
use ureq::http::Uri;

use crate::{InvalidCheck, MAX_ANSWER, Refusal, Waiting, reason};

/// The address of a service.
#[derive(Clone, Debug)]
pub(crate) struct ServiceCheck {
    url: String,
}

/// The answer of a service. Other fields are ignored.
#[derive(Deserialize)]
struct Answer {
    allow: bool,
    #[serde(default)]
    reason: Option<String>,
}

impl ServiceCheck {
    pub(crate) fn new(url: &str) -> Result<ServiceCheck, InvalidCheck> {
        const HINT: &str = "give an address such as http://127.0.0.1:9000/check";
        let invalid = |what: &str| InvalidCheck { what: format!("the check `{url}`: {what}"), hint: HINT };
        let uri: Uri = url.parse().map_err(|_| invalid("not a valid URL"))?;
        if uri.host().is_none_or(str::is_empty) {
            return Err(invalid("the URL has no host"));
        }
        if uri.authority().is_some_and(|authority| authority.as_str().contains('@')) {
            return Err(invalid("a URL with a user name is not supported"));
        }
        Ok(ServiceCheck { url: url.to_owned() })
    }

    pub(crate) fn check(&self, png: &[u8], prompt: &str, waiting: &Waiting<'_>) -> Result<(), Refusal> {
        let boundary = boundary()?;
        let body = form(&boundary, png, prompt);
        let (sender, receiver) = channel();
        let (url, timeout) = (self.url.clone(), waiting.timeout);
        // On a thread of its own, so that the caller can cancel. It ends with its own timeout.
        std::thread::spawn(move || {
            let config = Agent::config_builder()
                .timeout_global(Some(timeout))
                .max_redirects(0)
                .max_redirects_will_error(false)
                .http_status_as_error(false)
                // The image goes to the named service and nowhere else.
                .proxy(None)
                .build();
            let call = Agent::new_with_config(config)
                .post(&url)
                .header("content-type", format!("multipart/form-data; boundary={boundary}"))
                .header("user-agent", concat!("Kiln/", env!("CARGO_PKG_VERSION")));
            let answer = call.send(body).and_then(|mut response| {
                let status = response.status();
                // One byte more, so that a longer answer is noticed.
                let text = response.body_mut().with_config().limit(MAX_ANSWER as u64 + 1).read_to_vec()?;
                Ok((status, text))
            });
            let _ = sender.send(answer.map_err(|error| error.to_string()));
        });
        let (status, text) = waiting.receive(&receiver)?.map_err(Refusal::Failed)?;
        if status != 200 {
            return Err(Refusal::Failed(format!("the check answered with status {status}")));
        }
        if text.len() > MAX_ANSWER {
            return Err(Refusal::Failed(format!("the check answered with more than {MAX_ANSWER} bytes")));
        }
        match serde_json::from_slice::<Answer>(&text) {
            Ok(Answer { allow: true, .. }) => Ok(()),
            Ok(answer) => Err(Refusal::Refused(answer.reason.as_deref().and_then(reason))),
            Err(error) => Err(Refusal::Failed(format!("the check's answer is not valid: {error}"))),
        }
    }
}

/// A text that does not occur in the parts.
fn boundary() -> Result<String, Refusal> {
    let mut random = [0; 16];
    getrandom::fill(&mut random)
        .map_err(|error| Refusal::Failed(format!("the system gives no random numbers: {error}")))?;
    Ok(format!("kiln-{}", kiln_base::hex(random)))
}

/// The body of the request.
fn form(boundary: &str, png: &[u8], prompt: &str) -> Vec<u8> {
    let mut body = Vec::with_capacity(png.len() + prompt.len() + 512);
    let mut part = |head: &str, content: &[u8]| {
        let head = format!("--{boundary}\r\nContent-Disposition: form-data; {head}\r\n\r\n");
        body.extend_from_slice(head.as_bytes());
        body.extend_from_slice(content);
        body.extend_from_slice(b"\r\n");
    };
    part("name=\"prompt\"\r\nContent-Type: text/plain; charset=utf-8", prompt.as_bytes());
    part("name=\"image\"; filename=\"image.png\"\r\nContent-Type: image/png", png);
    body.extend_from_slice(format!("--{boundary}--\r\n").as_bytes());
    body
}
