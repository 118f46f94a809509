//! Metrics in Prometheus' text format.
//! The time of a batched job's steps includes waiting for the decoding of the others.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::Mutex;
use std::time::Duration;

use kiln_base::lock;
use kiln_engine::{Phase, StepCounts};

use crate::jobs::error::ErrorCode;
use crate::jobs::generator::LoadedModel;
use crate::jobs::job::JobState;

/// Upper bounds of the histograms' buckets, in seconds.
const BUCKETS: [f64; 12] = [0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0, 120.0, 600.0];

#[derive(Clone, Copy, Debug, Default)]
struct Histogram {
    counts: [u64; BUCKETS.len()],
    count: u64,
    sum: f64,
}

impl Histogram {
    fn add(&mut self, seconds: f64) {
        for (count, end) in self.counts.iter_mut().zip(BUCKETS) {
            *count += u64::from(seconds <= end);
        }
        self.count += 1;
        self.sum += seconds;
    }

    fn write(&self, out: &mut String, name: &str, label: &str) {
        let comma = if label.is_empty() { "" } else { "," };
        for (count, end) in self.counts.iter().zip(BUCKETS) {
            let _ = writeln!(out, "{name}_bucket{{{label}{comma}le=\"{end}\"}} {count}");
        }
        let braces = if label.is_empty() { String::new() } else { format!("{{{label}}}") };
        let _ = writeln!(out, "{name}_bucket{{{label}{comma}le=\"+Inf\"}} {}", self.count);
        let _ = writeln!(out, "{name}_sum{braces} {}\n{name}_count{braces} {}", self.sum, self.count);
    }
}

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

    pub(crate) fn text(&self, stats: &ServerStats) -> String {
        let mut out = String::new();
        let head = |out: &mut String, name: &str, kind: &str, help: &str| {
            let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
        };
        let one = |out: &mut String, name: &str, kind: &str, help: &str, value: u64| {
            head(out, name, kind, help);
            let _ = writeln!(out, "{name} {value}");
        };
        head(&mut out, "kiln_build_info", "gauge", "The version of Kiln.");
        let _ = writeln!(
            out,
            "kiln_build_info{{version=\"{}\",target=\"{}-{}\"}} 1",
            env!("CARGO_PKG_VERSION"),
            std::env::consts::ARCH,
            std::env::consts::OS
        );
        head(&mut out, "kiln_model_loaded", "gauge", "Models in memory, with their device and precision.");
        for LoadedModel { name, device, backend, dtype, .. } in &stats.models {
            let [name, device, backend, dtype] = [name, device, backend, dtype].map(|text| escape(text));
            let _ = writeln!(
                out,
                "kiln_model_loaded{{model=\"{name}\",device=\"{device}\",backend=\"{backend}\",dtype=\"{dtype}\"}} 1"
            );
        }
        head(&mut out, "kiln_model_load_seconds", "gauge", "How long loading each model in memory took.");
        for LoadedModel { name, device, load_seconds, .. } in &stats.models {
            let [name, device] = [name, device].map(|text| escape(text));
            let _ = writeln!(
                out,
                "kiln_model_load_seconds{{model=\"{name}\",device=\"{device}\"}} {load_seconds:.3}"
            );
        }
        head(&mut out, "kiln_device_free_bytes", "gauge", "Free memory of each device with a model.");
        let free = stats.models.iter().filter_map(|model| Some((model.device.as_str(), model.free_memory?)));
        for (device, free) in free.collect::<BTreeMap<_, _>>() {
            let _ = writeln!(out, "kiln_device_free_bytes{{device=\"{}\"}} {free}", escape(device));
        }
        one(&mut out, "kiln_queue_length", "gauge", "Queued jobs.", stats.queued as u64);
        one(
            &mut out,
            "kiln_queue_capacity",
            "gauge",
            "Maximum number of queued jobs.",
            stats.queue_capacity as u64,
        );
        one(&mut out, "kiln_running", "gauge", "Running jobs.", stats.running as u64);
        one(&mut out, "kiln_images_kept", "gauge", "Images in the gallery.", stats.saved_images);
        one(
            &mut out,
            "kiln_decoding_peak_bytes",
            "gauge",
            "Most memory reserved for decoding input images at one time.",
            stats.decoding_peak,
        );
        if let Some((resident, peak)) = memory() {
            one(&mut out, "process_resident_memory_bytes", "gauge", "Resident memory.", resident);
            one(&mut out, "kiln_memory_peak_bytes", "gauge", "Peak resident memory.", peak);
        }
        self.with(|c| {
            one(&mut out, "kiln_queue_refused_total", "counter", "Jobs refused because the queue was full.", c.refused);
            one(&mut out, "kiln_images_total", "counter", "Images generated.", c.images);
            one(&mut out, "kiln_image_bytes_total", "counter", "Bytes of the generated image files.", c.image_bytes);
            one(&mut out, "kiln_inputs_decoded_total", "counter", "Input images decoded.", c.decoded_inputs);
            one(&mut out, "kiln_panics_total", "counter", "Panics during planning or generation.", c.panics);
            head(&mut out, "kiln_batch_images_total", "counter", "Images started, by batch size.");
            for (size, count) in &c.batches {
                let _ = writeln!(out, "kiln_batch_images_total{{size=\"{size}\"}} {count}");
            }
            head(&mut out, "kiln_images_refused_total", "counter", "Images refused by the check, or because the check failed.");
            for (cause, count) in ["check", "failure"].iter().zip(c.refused_images) {
                let _ = writeln!(out, "kiln_images_refused_total{{cause=\"{cause}\"}} {count}");
            }
            head(&mut out, "kiln_steps_total", "counter", "Steps of generated images: computed, or reused from the step cache.");
            let _ = writeln!(out, "kiln_steps_total{{kind=\"computed\"}} {}", c.steps.computed);
            let _ = writeln!(out, "kiln_steps_total{{kind=\"reused\"}} {}", c.steps.reused);
            head(&mut out, "kiln_jobs_total", "counter", "Ended jobs, by final state.");
            for (state, count) in &c.jobs {
                let _ = writeln!(out, "kiln_jobs_total{{state=\"{state}\"}} {count}");
            }
            head(&mut out, "kiln_errors_total", "counter", "Failed jobs, by error code.");
            for (code, count) in &c.errors {
                let _ = writeln!(out, "kiln_errors_total{{code=\"{code}\"}} {count}");
            }
            head(&mut out, "kiln_phase_seconds", "histogram", "Duration of each phase of jobs; `queue` is the time waiting.");
            for (phase, histogram) in &c.phases {
                histogram.write(&mut out, "kiln_phase_seconds", &format!("phase=\"{phase}\""));
            }
            head(&mut out, "kiln_http_request_seconds", "histogram", "Time until the response starts, by route.");
            for (route, histogram) in &c.responses {
                histogram.write(&mut out, "kiln_http_request_seconds", &format!("route=\"{route}\""));
            }
            head(&mut out, "kiln_http_requests_total", "counter", "HTTP requests, by method, route and status.");
            for ((method, route, status), count) in &c.requests {
                let _ = writeln!(
                    out,
                    "kiln_http_requests_total{{method=\"{method}\",route=\"{route}\",status=\"{status}\"}} {count}"
                );
            }
        });
        out
    }
}

/// The label of a method. Clients make methods up: a label of their own for each would grow for ever.
fn method_label(method: &str) -> &'static str {
    const KNOWN: [&str; 7] = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"];
    KNOWN.into_iter().find(|known| *known == method).unwrap_or("other")
}

/// Escapes the value of a label.
fn escape(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
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
