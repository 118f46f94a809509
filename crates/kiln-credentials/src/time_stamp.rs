//! Time stamps of an authority (RFC 3161): that a signature was there at a time, also when its certificate has expired since.
//!
//! Of an answer, as much is read as tells that it is one to the question; who gave it is the validator's to judge.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use kiln_base::printable_line;
use ring::digest::{SHA256, digest};
use ureq::Agent;
use ureq::http::Uri;

use crate::der::{self, Element, element};
use crate::{Error, Result};

/// Longest that an answer may take.
const TIMEOUT: Duration = Duration::from_secs(15);
/// An image that is generated is not lost to one failure of the network.
const ATTEMPTS: usize = 3;
const PAUSE: Duration = Duration::from_secs(1);
/// Most bytes of an answer.
const MAX_ANSWER: u64 = 64 << 10;
/// Tokens of an authority differ in a few bytes: numbers, signatures.
const SLACK: usize = 48;

/// `id-sha256` and `id-signedData`.
const OID_SHA256: &[u8] = &[0x60, 0x86, 0x48, 1, 0x65, 3, 4, 2, 1];
const OID_SIGNED_DATA: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 7, 2];
/// Tags in answers.
const UTF8_STRING: u8 = 0x0c;
const EXPLICIT_0: u8 = 0xa0;
/// Statuses: granted, and granted with changes.
const GRANTED: [&[u8]; 2] = [&[0], &[1]];

/// An authority.
pub(crate) struct TimeStamps {
    url: String,
    agent: Agent,
    /// As many bytes have tokens at most, as far as is known.
    room: AtomicUsize,
}

/// What a token is asked for: the hash of something, and a number that no other request has.
struct Query {
    /// `MessageImprint`.
    imprint: Vec<u8>,
    /// `INTEGER`.
    nonce: Vec<u8>,
}

impl TimeStamps {
    /// Asks the authority for a token, so that the length of its tokens is known.
    pub fn open(url: &str) -> Result<TimeStamps> {
        let problem = |problem: &str| Error::TimeStamp { url: url.into(), problem: problem.into() };
        let uri: Uri = url.parse().map_err(|_| problem("not a valid URL"))?;
        let is_web = matches!(uri.scheme_str(), Some("http" | "https"));
        if !is_web || uri.host().is_none_or(str::is_empty) {
            return Err(problem("not an http:// or https:// URL"));
        }
        if uri.authority().is_some_and(|authority| authority.as_str().contains('@')) {
            return Err(problem("a URL with a user name is not supported"));
        }
        let config = Agent::config_builder()
            .timeout_global(Some(TIMEOUT))
            .max_redirects(0)
            .max_redirects_will_error(false)
            .http_status_as_error(false)
            .user_agent(concat!("Kiln/", env!("CARGO_PKG_VERSION")))
            .build();
        let stamps = TimeStamps { url: url.into(), agent: config.into(), room: AtomicUsize::new(0) };
        stamps.request(b"how long a token is").map_err(|error| stamps.error(error))?;
        Ok(stamps)
    }

    /// The bytes that a token may take.
    pub fn room(&self) -> usize {
        self.room.load(Relaxed)
    }

    /// Returns a token (`TimeStampToken`) for a message.
    pub fn stamp(&self, message: &[u8]) -> Result<Vec<u8>> {
        let mut last = String::new();
        for attempt in 0..ATTEMPTS {
            if attempt > 0 {
                std::thread::sleep(PAUSE);
            }
            match self.request(message) {
                Ok(token) => return Ok(token),
                Err(problem) => last = problem,
            }
        }
        Err(self.error(last))
    }

    fn error(&self, problem: String) -> Error {
        Error::TimeStamp { url: self.url.clone(), problem }
    }

    fn request(&self, message: &[u8]) -> std::result::Result<Vec<u8>, String> {
        let query = Query::new(message)?;
        let call = self.agent.post(&self.url).header("accept", "application/timestamp-reply");
        let call = call.header("content-type", "application/timestamp-query");
        let answer = call.send(query.encode()).and_then(|mut response| {
            let status = response.status();
            let limited = response.body_mut().with_config().limit(MAX_ANSWER);
            // What comes with an error is not read.
            let body = if status == 200 { limited.read_to_vec()? } else { Vec::new() };
            Ok((status, body))
        });
        let (status, body) = answer.map_err(|error| error.to_string())?;
        if status != 200 {
            return Err(format!("it answered with status {status}"));
        }
        let token = query.token(&body)?.to_vec();
        if token.len() > self.room() {
            self.room.fetch_max(token.len() + SLACK, Relaxed);
        }
        Ok(token)
    }
}

impl Query {
    fn new(message: &[u8]) -> std::result::Result<Query, String> {
        let mut random = [0; 8];
        getrandom::fill(&mut random)
            .map_err(|error| format!("the system gives no random numbers: {error}"))?;
        // Positive, and of the same length always.
        random[0] = random[0] & 0x7f | 0x40;
        let algorithm = [element(der::OBJECT_IDENTIFIER, OID_SHA256), element(der::NULL, &[])].concat();
        let hash = element(der::OCTET_STRING, digest(&SHA256, message).as_ref());
        Ok(Query {
            imprint: element(der::SEQUENCE, &[element(der::SEQUENCE, &algorithm), hash].concat()),
            nonce: element(der::INTEGER, &random),
        })
    }

    /// `TimeStampReq`, which asks for the authority's certificates, too.
    fn encode(&self) -> Vec<u8> {
        let (version, certificates) = (element(der::INTEGER, &[1]), element(der::BOOLEAN, &[0xff]));
        element(der::SEQUENCE, &[&version[..], &self.imprint, &self.nonce, &certificates].concat())
    }

    /// Returns the token of an answer (`TimeStampResp`), if it is one to this query.
    fn token<'a>(&self, answer: &'a [u8]) -> std::result::Result<&'a [u8], String> {
        let damaged = || "its answer is no time stamp".to_owned();
        let (answer, _) =
            Element::read(answer).filter(|(all, _)| all.tag == der::SEQUENCE).ok_or_else(damaged)?;
        let mut parts = answer.children();
        let mut status = parts.next().ok_or_else(damaged)?.children();
        let code = status.next().filter(|code| code.tag == der::INTEGER).ok_or_else(damaged)?.content;
        if !GRANTED.contains(&code) {
            let reason =
                status.find(|text| text.tag == der::SEQUENCE).and_then(|texts| texts.children().next());
            let reason = reason.filter(|text| text.tag == UTF8_STRING);
            let reason = reason.map(|text| String::from_utf8_lossy(text.content).into_owned());
            let reason = reason.map_or(String::new(), |reason| format!(": {}", printable_line(&reason)));
            let code = code.iter().fold(0_u32, |code, byte| code << 8 | u32::from(*byte));
            return Err(format!("it refused with status {code}{reason}"));
        }
        let token = parts.next().ok_or_else(|| "its answer has no token".to_owned())?;
        let info = info(token).ok_or_else(damaged)?;
        // Version, policy, imprint, …
        if info.children().nth(2).is_none_or(|imprint| imprint.whole != self.imprint) {
            return Err("its time stamp is of something else".into());
        }
        if !info.children().any(|field| field.whole == self.nonce) {
            return Err("its answer is to another request".into());
        }
        Ok(token.whole)
    }
}

/// `TSTInfo` inside of a `TimeStampToken`: the content of a CMS message.
fn info(token: Element<'_>) -> Option<Element<'_>> {
    let mut parts = token.children();
    parts.next().filter(|kind| kind.tag == der::OBJECT_IDENTIFIER && kind.content == OID_SIGNED_DATA)?;
    let signed = parts.next().filter(|content| content.tag == EXPLICIT_0)?.children().next()?;
    // Version, algorithms, content.
    let content = signed.children().nth(2)?.children().find(|part| part.tag == EXPLICIT_0)?;
    let octets = content.children().next().filter(|octets| octets.tag == der::OCTET_STRING)?;
    Element::read(octets.content).map(|(info, _)| info).filter(|info| info.tag == der::SEQUENCE)
}

#[cfg(test)]
#[path = "../tests/credentials/tsa.rs"]
mod tsa;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damaged_answers_never_panic_and_are_no_answers_to_the_question() {
        let query = Query::new(b"message").unwrap();
        let answer = tsa::Tsa::new().answer(&query.encode());
        let token = query.token(&answer).unwrap();
        assert!(answer.ends_with(token) && token.len() > 500);
        for cut in 0..answer.len() {
            assert!(query.token(&answer[..cut]).is_err(), "cut at {cut}");
        }
        let place = |part: &[u8]| {
            let start = answer.windows(part.len()).position(|window| window == part).unwrap();
            start..start + part.len()
        };
        let (imprint, nonce) = (place(&query.imprint), place(&query.nonce));
        for at in 0..answer.len() {
            for value in [0, 1, 0x30, 0x7f, 0x80, 0x84, 0xff] {
                let mut damaged = answer.clone();
                damaged[at] = value;
                // Whatever else the authority signs is the validator's to judge.
                let is_other = value != answer[at] && (imprint.contains(&at) || nonce.contains(&at));
                assert!(query.token(&damaged).is_err() || !is_other, "{value} at {at}");
            }
        }
    }
}
