//! Metrics in Prometheus' text format.

use std::fmt::{Display, Write};

/// Upper bounds of the histograms' buckets, in seconds.
const BUCKETS: [f64; 12] = [0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0, 120.0, 600.0];

/// How often something took how long.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Histogram {
    counts: [u64; BUCKETS.len()],
    count: u64,
    sum: f64,
}

impl Histogram {
    pub(super) fn add(&mut self, seconds: f64) {
        for (count, end) in self.counts.iter_mut().zip(BUCKETS) {
            *count += u64::from(seconds <= end);
        }
        self.count += 1;
        self.sum += seconds;
    }
}

/// The text, metric by metric.
#[derive(Default)]
pub(crate) struct MetricsText(pub(crate) String);

impl MetricsText {
    /// Adds a value that goes up and down.
    pub(crate) fn gauge(&mut self, name: &str, help: &str, value: impl Display) {
        self.family(name, "gauge", help, [([], value)]);
    }

    /// Adds a value that only grows.
    pub(crate) fn counter(&mut self, name: &str, help: &str, value: impl Display) {
        self.family(name, "counter", help, [([], value)]);
    }

    /// Adds a metric with a value for each set of labels.
    pub(crate) fn family<const N: usize, V: Display>(
        &mut self,
        name: &str,
        kind: &str,
        help: &str,
        values: impl IntoIterator<Item = ([(&'static str, String); N], V)>,
    ) {
        self.head(name, kind, help);
        for (labels, value) in values {
            self.line(name, &labels, value);
        }
    }

    /// Adds histograms that differ in one label.
    pub(super) fn histograms<'a, L: Display + 'a>(
        &mut self,
        name: &str,
        help: &str,
        label: &'static str,
        histograms: impl IntoIterator<Item = (L, &'a Histogram)>,
    ) {
        self.head(name, "histogram", help);
        for (value, histogram) in histograms {
            let own = (label, value.to_string());
            let up_to = |end: &dyn Display| [own.clone(), ("le", end.to_string())];
            for (end, count) in BUCKETS.iter().zip(histogram.counts) {
                self.line(&format!("{name}_bucket"), &up_to(end), count);
            }
            self.line(&format!("{name}_bucket"), &up_to(&"+Inf"), histogram.count);
            let own = [own];
            self.line(&format!("{name}_sum"), &own, histogram.sum);
            self.line(&format!("{name}_count"), &own, histogram.count);
        }
    }

    fn head(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn line(&mut self, name: &str, labels: &[(&str, String)], value: impl Display) {
        let labels: Vec<String> =
            labels.iter().map(|(label, text)| format!("{label}=\"{}\"", escape(text))).collect();
        let _ = match labels.join(",") {
            labels if labels.is_empty() => writeln!(self.0, "{name} {value}"),
            labels => writeln!(self.0, "{name}{{{labels}}} {value}"),
        };
    }
}

/// Escapes the value of a label.
fn escape(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}
