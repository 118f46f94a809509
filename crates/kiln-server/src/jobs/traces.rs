//! Traces: the spans of jobs, sent to an OpenTelemetry collector as OTLP over HTTP in its JSON form.
//!
//! A job's trace begins with its submission, or is that of the request's `traceparent` header, and travels with the job: in a
//! fleet, the gateway's span `submit` and the worker's `queue`, `generate` and their phases are one trace.

use std::fmt;
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use kiln_base::{hex, lock};
use serde_json::{Value, json};

use crate::jobs::random::random_bytes;

/// How long spans wait for others before they are sent.
const DELAY: Duration = Duration::from_secs(1);
/// Spans of one message.
const MAX_BATCH: usize = 512;
/// Spans that wait; more are dropped: a collector that is away must not slow jobs down.
const MAX_WAITING: usize = 8192;
/// How long a message may take.
const TIMEOUT: Duration = Duration::from_secs(5);
/// How often a collector that is away is reported.
const REPORT: Duration = Duration::from_secs(60);

/// Where traces go.
#[derive(Clone, Debug)]
pub struct TraceConfig {
    /// The collector, such as `http://localhost:4318`.
    pub endpoint: String,
    /// The name of this service in traces.
    pub service: String,
}

/// The place of a span in its trace, as in the header `traceparent` of W3C's Trace Context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TraceContext {
    trace: [u8; 16],
    span: [u8; 8],
}

impl TraceContext {
    /// A new trace.
    pub(crate) fn new() -> TraceContext {
        TraceContext { trace: random_bytes(), span: random_bytes() }
    }

    /// Another span of the same trace.
    pub(crate) fn child(self) -> TraceContext {
        TraceContext { span: random_bytes(), ..self }
    }

    /// Reads `00-TRACE-SPAN-FLAGS`; `None` for anything else.
    pub(crate) fn parse(text: &str) -> Option<TraceContext> {
        let mut parts = text.split('-');
        let (version, trace, span) = (parts.next()?, parts.next()?, parts.next()?);
        let is_known = version.len() == 2 && version != "ff" && parts.next()?.len() == 2;
        let context = TraceContext { trace: parse_hex(trace)?, span: parse_hex(span)? };
        (is_known && context.trace != [0; 16] && context.span != [0; 8]).then_some(context)
    }
}

impl fmt::Display for TraceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "00-{}-{}-01", hex(self.trace), hex(self.span))
    }
}

fn parse_hex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let digits = text.as_bytes();
    let is_hex = |digit: &u8| digit.is_ascii_digit() || (b'a'..=b'f').contains(digit);
    if digits.len() != 2 * N || !digits.iter().all(is_hex) {
        return None;
    }
    let mut bytes = [0; N];
    for (byte, pair) in bytes.iter_mut().zip(text.as_bytes().chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(bytes)
}

/// What kind of work a span is, as OTLP numbers it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum SpanKind {
    Internal = 1,
    Producer = 4,
    Consumer = 5,
}

/// A finished span.
#[derive(Debug)]
pub(crate) struct Span {
    pub(crate) name: &'static str,
    pub(crate) kind: SpanKind,
    pub(crate) context: TraceContext,
    pub(crate) parent: Option<TraceContext>,
    /// Its start; it ends when it is sent.
    pub(crate) started: Instant,
    pub(crate) attributes: Vec<(&'static str, String)>,
    pub(crate) error: Option<String>,
}

/// Sends spans on a thread of its own; what still waits is sent at the end.
pub(crate) struct Tracer {
    spans: Option<SyncSender<([u128; 2], Span)>>,
    /// A moment and its Unix time in nanoseconds. All times follow from this one, so that spans nest as they ran.
    epoch: (Instant, u128),
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Tracer {
    /// One that sends nothing without a configuration.
    pub(crate) fn new(config: Option<&TraceConfig>) -> Tracer {
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        let off = Tracer { spans: None, epoch: (Instant::now(), unix), thread: Mutex::default() };
        let Some(config) = config.cloned() else { return off };
        let (spans, waiting) = sync_channel(MAX_WAITING);
        let thread = std::thread::Builder::new().name("traces".into());
        match thread.spawn(move || send_all(&config, &waiting)) {
            Ok(thread) => Tracer { spans: Some(spans), epoch: off.epoch, thread: Mutex::new(Some(thread)) },
            Err(error) => {
                tracing::error!(%error, "failed to start the thread of traces");
                off
            }
        }
    }

    /// Whether spans are sent.
    pub(crate) fn is_on(&self) -> bool {
        self.spans.is_some()
    }

    /// Sends a span that ends now. Never waits.
    pub(crate) fn send(&self, span: Span) {
        let Some(spans) = &self.spans else { return };
        let times = [span.started, Instant::now()].map(|moment| self.unix_nanos(moment));
        if let Err(TrySendError::Disconnected(_)) = spans.try_send((times, span)) {
            tracing::error!("the thread of traces has ended");
        }
    }

    fn unix_nanos(&self, moment: Instant) -> u128 {
        let (epoch, nanos) = self.epoch;
        match moment.checked_duration_since(epoch) {
            Some(later) => nanos + later.as_nanos(),
            None => nanos.saturating_sub(epoch.duration_since(moment).as_nanos()),
        }
    }
}

impl Drop for Tracer {
    fn drop(&mut self) {
        self.spans = None;
        if let Some(thread) = lock(&self.thread).take() {
            let _ = thread.join();
        }
    }
}

fn send_all(config: &TraceConfig, spans: &Receiver<([u128; 2], Span)>) {
    let url = format!("{}/v1/traces", config.endpoint.trim_end_matches('/'));
    let agent: ureq::Agent = ureq::Agent::config_builder().timeout_global(Some(TIMEOUT)).build().into();
    let mut reported: Option<Instant> = None;
    while let Ok(first) = spans.recv() {
        let mut batch = vec![first];
        let due = Instant::now() + DELAY;
        let is_last = loop {
            match spans.recv_timeout(due.saturating_duration_since(Instant::now())) {
                Ok(span) => batch.push(span),
                Err(RecvTimeoutError::Timeout) => break false,
                Err(RecvTimeoutError::Disconnected) => break true,
            }
            if batch.len() == MAX_BATCH {
                break false;
            }
        };
        let body = message(config, &batch).to_string();
        let sent = agent.post(&url).content_type("application/json").send(body.as_bytes());
        if let Err(error) = sent
            && reported.is_none_or(|last| last.elapsed() > REPORT)
        {
            tracing::warn!(url, %error, "traces can't be sent");
            reported = Some(Instant::now());
        }
        if is_last {
            return;
        }
    }
}

fn message(config: &TraceConfig, spans: &[([u128; 2], Span)]) -> Value {
    let service = [("service.name", config.service.clone())];
    let spans: Vec<Value> = spans.iter().map(|(times, span)| span_json(*times, span)).collect();
    json!({ "resourceSpans": [{
        "resource": { "attributes": attributes(&service) },
        "scopeSpans": [{ "scope": { "name": "kiln", "version": env!("CARGO_PKG_VERSION") }, "spans": spans }],
    }] })
}

fn span_json([started, ended]: [u128; 2], span: &Span) -> Value {
    let mut json = json!({
        "traceId": hex(span.context.trace),
        "spanId": hex(span.context.span),
        "name": span.name,
        "kind": span.kind as u32,
        // 64-bit numbers are strings in this form.
        "startTimeUnixNano": started.to_string(),
        "endTimeUnixNano": ended.to_string(),
        "attributes": attributes(&span.attributes),
    });
    if let Some(parent) = span.parent {
        json["parentSpanId"] = hex(parent.span).into();
    }
    if let Some(error) = &span.error {
        json["status"] = json!({ "code": 2, "message": error });
    }
    json
}

fn attributes(list: &[(&'static str, String)]) -> Vec<Value> {
    list.iter().map(|(key, value)| json!({ "key": key, "value": { "stringValue": value } })).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_context_is_read_as_it_is_written() {
        let context = TraceContext::new();
        assert_eq!(TraceContext::parse(&context.to_string()), Some(context));
        assert_eq!(context.child().trace, context.trace);
        let (trace, span) = ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331");
        assert!(TraceContext::parse(&format!("00-{trace}-{span}-01")).is_some());
        for wrong in [
            String::new(),
            format!("00-{trace}-{span}"),
            format!("ff-{trace}-{span}-01"),
            format!("00-{}-{span}-01", "0".repeat(32)),
            format!("00-{}-{span}-01", trace.to_uppercase()),
            format!("00-{trace}é-{span}-01"),
            format!("00-{}-{span}-01", &trace[1..]),
        ] {
            assert_eq!(TraceContext::parse(&wrong), None, "{wrong}");
        }
    }
}
