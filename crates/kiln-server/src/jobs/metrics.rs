//! Counters and histograms of a server, for `/metrics`.
//! The time of a batched job's steps includes waiting for the decoding of the others.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Duration;

use kiln_base::lock;
use kiln_engine::{Phase, StepCounts};

use crate::jobs::error::ErrorCode;
use crate::jobs::generator::LoadedModel;
use crate::jobs::job::JobState;
use crate::jobs::metrics_text::{Histogram, MetricsText};

#[derive(Debug, Default)]
struct Counters {
    /// HTTP requests by method, route and status.
    requests: BTreeMap<(&'static str, String, u16), u64>,
    /// Time until the response starts, by route.
    responses: BTreeMap<String, Histogram>,
    phases: BTreeMap<&'static str, Histogram>,
    jobs: BTreeMap<&'static str, u64>,
    errors: BTreeMap<&'static str, u64>,
    refused: u64,
    images: u64,
    /// Images by batch size.
    batches: BTreeMap<u32, u64>,
    decoded_inputs: u64,
    image_bytes: u64,
    steps: StepCounts,
    /// Images refused by the check, and images whose check failed.
    refused_images: [u64; 2],
    panics: u64,
    /// Moving average of the seconds that done jobs took for a unit of work, without the time in the queue.
    recent_seconds_per_cost: Option<f64>,
}

/// Counters and histograms since the start.
#[derive(Debug, Default)]
pub(crate) struct Metrics(Mutex<Counters>);

/// Current values.
pub(crate) struct ServerStats {
    pub(crate) queued: usize,
    pub(crate) running: usize,
    pub(crate) queue_capacity: usize,
    pub(crate) saved_images: u64,
    /// Most memory reserved for decoding at one time, in bytes.
    pub(crate) decoding_peak: u64,
    pub(crate) models: Vec<LoadedModel>,
}

impl Metrics {
    fn with<T>(&self, f: impl FnOnce(&mut Counters) -> T) -> T {
        f(&mut lock(&self.0))
    }

    pub(crate) fn request(&self, method: &str, route: &str, status: u16, took: Duration) {
        let method = method_label(method);
        self.with(|c| {
            *c.requests.entry((method, route.to_owned(), status)).or_default() += 1;
            c.responses.entry(route.to_owned()).or_default().add(took.as_secs_f64());
        });
    }

    pub(crate) fn phase(&self, phase: Phase, took: Duration) {
        self.with(|c| c.phases.entry(phase.name()).or_default().add(took.as_secs_f64()));
    }

    /// Counts an ended job that took this long for `cost` units of work.
    pub(crate) fn job(&self, state: JobState, code: Option<ErrorCode>, took: Duration, cost: f64) {
        self.with(|c| {
            *c.jobs.entry(state.name()).or_default() += 1;
            if let Some(code) = code {
                *c.errors.entry(code.name()).or_default() += 1;
            }
            if state == JobState::Done {
                let each = took.as_secs_f64() / cost;
                let average = c.recent_seconds_per_cost.map_or(each, |average| 0.8 * average + 0.2 * each);
                c.recent_seconds_per_cost = Some(average);
            }
        });
    }

    pub(crate) fn job_refused(&self) {
        self.with(|c| c.refused += 1);
    }

    pub(crate) fn panicked(&self) {
        self.with(|c| c.panics += 1);
    }

    pub(crate) fn image_saved(&self, bytes: usize, steps: StepCounts) {
        self.with(|c| {
            c.images += 1;
            c.image_bytes += bytes as u64;
            c.steps.computed += steps.computed;
            c.steps.reused += steps.reused;
        });
    }

    /// Counts an image that the check refused, by a verdict or because it failed.
    pub(crate) fn image_refused(&self, by_verdict: bool) {
        self.with(|c| c.refused_images[usize::from(!by_verdict)] += 1);
    }

    /// Counts `own` images of a job in a batch of `all`.
    pub(crate) fn batch(&self, own: u32, all: u32) {
        self.with(|c| *c.batches.entry(all).or_default() += u64::from(own));
    }

    pub(crate) fn input_decoded(&self) {
        self.with(|c| c.decoded_inputs += 1);
    }

    /// Average seconds of recent jobs for a unit of work, without the time in the queue.
    pub(crate) fn recent_seconds_per_cost(&self) -> Option<f64> {
        self.with(|c| c.recent_seconds_per_cost)
    }

    pub(crate) fn text(&self, stats: &ServerStats) -> MetricsText {
        let mut out = MetricsText::default();
        let target = format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS);
        let version = [("version", env!("CARGO_PKG_VERSION").into()), ("target", target)];
        out.family("kiln_build_info", "gauge", "The version of Kiln.", [(version, 1)]);
        let loaded = stats.models.iter().map(|model| {
            let LoadedModel { name, device, backend, dtype, .. } = model.clone();
            ([("model", name), ("device", device), ("backend", backend), ("dtype", dtype)], 1)
        });
        let help = "Models in memory, with their device and precision.";
        out.family("kiln_model_loaded", "gauge", help, loaded);
        let load_seconds = stats.models.iter().map(|model| {
            let labels = [("model", model.name.clone()), ("device", model.device.clone())];
            (labels, format!("{:.3}", model.load_seconds))
        });
        let help = "How long loading each model in memory took.";
        out.family("kiln_model_load_seconds", "gauge", help, load_seconds);
        let free = stats.models.iter().filter_map(|model| Some((&model.device, model.free_memory?)));
        let free = free.collect::<BTreeMap<_, _>>().into_iter();
        let free = free.map(|(device, free)| ([("device", device.clone())], free));
        out.family("kiln_device_free_bytes", "gauge", "Free memory of each device with a model.", free);
        out.gauge("kiln_queue_length", "Queued jobs.", stats.queued);
        out.gauge("kiln_queue_capacity", "Maximum number of queued jobs.", stats.queue_capacity);
        out.gauge("kiln_running", "Running jobs.", stats.running);
        out.gauge("kiln_images_kept", "Images in the gallery.", stats.saved_images);
        let help = "Most memory reserved for decoding input images at one time.";
        out.gauge("kiln_decoding_peak_bytes", help, stats.decoding_peak);
        if let Some((resident, peak)) = memory() {
            out.gauge("process_resident_memory_bytes", "Resident memory.", resident);
            out.gauge("kiln_memory_peak_bytes", "Peak resident memory.", peak);
        }
        self.with(|counters| counters.write(&mut out));
        out
    }
}

impl Counters {
    fn write(&self, out: &mut MetricsText) {
        out.counter("kiln_queue_refused_total", "Jobs refused because the queue was full.", self.refused);
        out.counter("kiln_images_total", "Images generated.", self.images);
        out.counter("kiln_image_bytes_total", "Bytes of the generated image files.", self.image_bytes);
        out.counter("kiln_inputs_decoded_total", "Input images decoded.", self.decoded_inputs);
        out.counter("kiln_panics_total", "Panics during planning or generation.", self.panics);
        let batches = self.batches.iter().map(|(size, count)| ([("size", size.to_string())], count));
        out.family("kiln_batch_images_total", "counter", "Images started, by batch size.", batches);
        let refused = ["check", "failure"].into_iter().zip(self.refused_images);
        let refused = refused.map(|(cause, count)| ([("cause", cause.to_owned())], count));
        let help = "Images refused by the check, or because the check failed.";
        out.family("kiln_images_refused_total", "counter", help, refused);
        let steps = [("computed", self.steps.computed), ("reused", self.steps.reused)];
        let steps = steps.map(|(kind, count)| ([("kind", kind.to_owned())], count));
        let help = "Steps of generated images: computed, or reused from the step cache.";
        out.family("kiln_steps_total", "counter", help, steps);
        let jobs = self.jobs.iter().map(|(state, count)| ([("state", (*state).to_owned())], count));
        out.family("kiln_jobs_total", "counter", "Ended jobs, by final state.", jobs);
        let errors = self.errors.iter().map(|(code, count)| ([("code", (*code).to_owned())], count));
        out.family("kiln_errors_total", "counter", "Failed jobs, by error code.", errors);
        let help = "Duration of each phase of jobs; `queue` is the time waiting.";
        out.histograms("kiln_phase_seconds", help, "phase", &self.phases);
        let help = "Time until the response starts, by route.";
        out.histograms("kiln_http_request_seconds", help, "route", &self.responses);
        let requests = self.requests.iter().map(|((method, route, status), count)| {
            let method = ("method", (*method).to_owned());
            ([method, ("route", route.clone()), ("status", status.to_string())], count)
        });
        let help = "HTTP requests, by method, route and status.";
        out.family("kiln_http_requests_total", "counter", help, requests);
    }
}

/// The label of a method. Clients make methods up: a label of their own for each would grow for ever.
fn method_label(method: &str) -> &'static str {
    const KNOWN: [&str; 7] = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"];
    KNOWN.into_iter().find(|known| *known == method).unwrap_or("other")
}

/// Resident memory of this process in bytes, current and peak; only on Linux.
fn memory() -> Option<(u64, u64)> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim_start_matches(':').trim().trim_end_matches(" kB").parse::<u64>().ok().map(|kb| kb * 1024)
    };
    Some((field("VmRSS")?, field("VmHWM")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_is_a_comment_or_a_name_and_a_number() {
        let metrics = Metrics::default();
        metrics.request("GET", "/healthz", 200, Duration::from_millis(3));
        metrics.phase(Phase::Steps, Duration::from_secs(2));
        metrics.batch(1, 3);
        metrics.batch(2, 3);
        metrics.job(JobState::Done, None, Duration::from_secs(2), 1.0);
        metrics.job(JobState::Failed, Some(ErrorCode::Panicked), Duration::ZERO, 1.0);
        let model = LoadedModel {
            name: "a \"b\"".into(),
            device: "cpu".into(),
            backend: "cpu (avx2)".into(),
            dtype: "f32".into(),
            load_seconds: 1.5,
            free_memory: Some(1 << 30),
        };
        let text = metrics.text(&ServerStats {
            queued: 3,
            running: 1,
            queue_capacity: 64,
            saved_images: 9,
            decoding_peak: 0,
            models: vec![model],
        });
        let text = text.0;
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let (name, value) = line.rsplit_once(' ').unwrap();
            assert!(name.starts_with("kiln_") || name.starts_with("process_"), "{line}");
            assert!(value.parse::<f64>().is_ok(), "{line}");
        }
        assert!(text.contains("kiln_queue_length 3\n"));
        assert!(text.contains("kiln_model_load_seconds{model=\"a \\\"b\\\"\",device=\"cpu\"} 1.500\n"));
        assert!(text.contains("kiln_device_free_bytes{device=\"cpu\"} 1073741824\n"));
        assert!(text.contains(concat!(
            "kiln_build_info{version=\"",
            env!("CARGO_PKG_VERSION"),
            "\",target="
        )));
        let loaded = r#"kiln_model_loaded{model="a \"b\"",device="cpu",backend="cpu (avx2)",dtype="f32"} 1"#;
        assert!(text.contains(loaded), "{text}");
        assert!(text.contains("kiln_http_request_seconds_count{route=\"/healthz\"} 1\n"));
        assert!(text.contains("kiln_batch_images_total{size=\"3\"} 3\n"));
        assert!(text.contains("kiln_phase_seconds_bucket{phase=\"steps\",le=\"2.5\"} 1\n"));
        assert!(text.contains("kiln_phase_seconds_bucket{phase=\"steps\",le=\"1\"} 0\n"));
        assert!(
            text.contains("kiln_http_requests_total{method=\"GET\",route=\"/healthz\",status=\"200\"} 1\n")
        );
    }

    #[test]
    fn the_average_follows_recent_jobs() {
        let metrics = Metrics::default();
        assert_eq!(metrics.recent_seconds_per_cost(), None);
        metrics.job(JobState::Done, None, Duration::from_secs(10), 1.0);
        metrics.job(JobState::Failed, None, Duration::from_secs(100), 1.0);
        metrics.job(JobState::Done, None, Duration::from_secs(20), 4.0);
        assert!((metrics.recent_seconds_per_cost().unwrap() - 9.0).abs() < 1e-9);
    }
}
