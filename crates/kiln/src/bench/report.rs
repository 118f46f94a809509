//! The results of `kiln bench`, as tables or JSON.

use std::collections::BTreeMap;
use std::io::Write;

use kiln_cpu::{Peak, Peaks};
use kiln_ops::OpStats;
use kiln_weights::{LinearPrecision, WeightSource};
use serde::Serialize;

use super::plan::BenchPlan;
use super::table::Table;
use crate::args::BenchArgs;
use crate::values::{bytes, plural};

/// The results of one `kiln bench`; its JSON is what `--json` prints.
#[derive(Debug, Serialize)]
pub struct BenchReport {
    pub kiln: &'static str,
    pub model: String,
    pub backend: String,
    pub dtype: String,
    pub width: usize,
    pub height: usize,
    pub references: usize,
    pub text_tokens: usize,
    /// Operations or bytes per second, by name.
    pub peaks: BTreeMap<&'static str, f64>,
    /// The peaks that `of peak` compares operations with.
    pub compute_peak: Option<&'static str>,
    pub memory_peak: Option<&'static str>,
    pub load: Vec<LoadResult>,
    pub phases: Vec<PhaseResult>,
    /// The largest of the phases' values, in bytes.
    pub memory_beyond_weights: Option<u64>,
    pub notes: Vec<String>,
    #[serde(skip)]
    pub quiet: bool,
}

/// The loading of a component, from files or as synthetic weights.
#[derive(Debug, Serialize)]
pub struct LoadResult {
    #[serde(rename = "part")]
    pub component: &'static str,
    pub seconds: f64,
    pub weight_bytes: u64,
    /// Memory behind synthetic weights; less than `weight_bytes` if values repeat.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub distinct_bytes: Option<u64>,
}

/// A measured phase.
#[derive(Debug, Serialize)]
pub struct PhaseResult {
    pub phase: String,
    /// Time of each run, in order.
    pub seconds: Vec<f64>,
    pub median: f64,
    pub best: f64,
    /// Peak memory of the process without the weights, in bytes; on a GPU all its memory in use.
    pub memory_beyond_weights: Option<u64>,
    /// Transformer calls in all runs that were CUDA graph replays.
    #[serde(rename = "replayed")]
    pub graph_replays: usize,
    /// Operations of one run, longest first.
    pub operations: Vec<Operation>,
}

/// The calls of one operation with one size, in one run.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Operation {
    pub operation: String,
    pub size: String,
    pub calls: f64,
    pub seconds: f64,
    pub flops: f64,
    pub bytes: f64,
}

impl PhaseResult {
    /// Creates the result; `ops` are the operations of `counted` runs together.
    pub fn new(
        phase: &str,
        seconds: Vec<f64>,
        memory: Option<u64>,
        ops: Vec<OpStats>,
        counted: usize,
    ) -> PhaseResult {
        let runs = counted.max(1) as f64;
        let one = |op: OpStats| Operation {
            operation: op.op.into(),
            size: op.detail,
            calls: op.calls as f64 / runs,
            seconds: op.time.as_secs_f64() / runs,
            flops: op.flops as f64 / runs,
            bytes: op.bytes as f64 / runs,
        };
        let mut operations: Vec<Operation> = ops.into_iter().map(one).collect();
        operations.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
        let mut sorted = seconds.clone();
        sorted.sort_by(f64::total_cmp);
        let median = match sorted.len() {
            0 => 0.0,
            n if n % 2 == 1 => sorted[n / 2],
            n => (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0,
        };
        let best = sorted.first().copied().unwrap_or(0.0);
        let memory_beyond_weights = memory;
        PhaseResult {
            phase: phase.into(),
            seconds,
            median,
            best,
            memory_beyond_weights,
            graph_replays: 0,
            operations,
        }
    }

    /// Sums up the operations over all sizes.
    fn by_operation(&self) -> Vec<Operation> {
        let mut sums = BTreeMap::<&str, Operation>::new();
        for op in &self.operations {
            let sum = sums.entry(&op.operation).or_default();
            sum.operation = op.operation.clone();
            sum.calls += op.calls;
            sum.seconds += op.seconds;
            sum.flops += op.flops;
            sum.bytes += op.bytes;
        }
        let mut all: Vec<_> = sums.into_values().collect();
        all.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
        all
    }
}

impl BenchReport {
    /// Returns an empty report.
    pub fn new(args: &BenchArgs, plan: &BenchPlan, backend: String) -> BenchReport {
        BenchReport {
            kiln: env!("CARGO_PKG_VERSION"),
            model: plan.source.name(),
            backend,
            dtype: match plan.linear_precision {
                LinearPrecision::Int8 { .. } => "int8".into(),
                LinearPrecision::Fp8 | LinearPrecision::Stored { nvfp4: false } => "fp8".into(),
                LinearPrecision::Stored { nvfp4: true } => "nvfp4".into(),
                LinearPrecision::Float => plan.dtype.to_string(),
            },
            width: plan.width,
            height: plan.height,
            references: plan.references,
            text_tokens: plan.text_tokens,
            peaks: BTreeMap::new(),
            compute_peak: None,
            memory_peak: None,
            load: Vec::new(),
            phases: Vec::new(),
            memory_beyond_weights: None,
            notes: Vec::new(),
            quiet: args.json,
        }
    }

    /// Sets the peaks, and those to compare with.
    pub fn set_peaks(&mut self, peaks: &Peaks, compute: Option<&Peak>) {
        self.peaks = peaks.all().map(|peak| (peak.name, peak.rate)).collect();
        self.compute_peak = compute.map(|peak| peak.name);
        self.memory_peak = peaks.read.as_ref().map(|peak| peak.name);
    }

    pub fn note(&mut self, note: impl Into<String>) {
        self.notes.push(note.into());
    }

    /// Prints what is measured next.
    pub fn begin(&self, what: &str) {
        if !self.quiet {
            let _ = writeln!(std::io::stderr(), "{what} …");
        }
    }

    pub fn loaded(&mut self, component: &'static str, seconds: f64, weights: &WeightSource) {
        let (weight_bytes, distinct_bytes) = match weights.synthetic_bytes() {
            Some((total, distinct)) => (total, Some(distinct)),
            None => (weights.bytes(), None),
        };
        if let Some(distinct) = distinct_bytes.filter(|distinct| *distinct < weight_bytes) {
            self.note(format!(
                "not enough memory for all synthetic weights of the {component}: {} of {} are distinct, the rest repeats them",
                bytes(distinct),
                bytes(weight_bytes)
            ));
        }
        self.load.push(LoadResult { component, seconds, weight_bytes, distinct_bytes });
    }

    pub fn phase(&mut self, phase: PhaseResult) {
        self.memory_beyond_weights = self.memory_beyond_weights.max(phase.memory_beyond_weights);
        if phase.graph_replays > 0 {
            let (calls, phase) = (plural(phase.graph_replays, "transformer call"), &phase.phase);
            self.note(format!("{phase}: {calls} replayed as CUDA graphs"));
        }
        self.phases.push(phase);
    }

    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).unwrap_or_default() + "\n"
    }

    /// Formats the report as tables; `by_size` lists operations by size.
    pub fn to_text(&self, by_size: bool) -> String {
        let mut out = format!(
            "{} on {}, {}, {}×{}, {}, {} text tokens\n\n",
            self.model,
            self.backend,
            self.dtype,
            self.width,
            self.height,
            plural(self.references, "reference"),
            self.text_tokens,
        );
        out += &peaks_table(&self.peaks);
        let mut loads = Table::new(&["load", "seconds", "weights"]);
        for load in &self.load {
            loads.row([load.component.into(), seconds(load.seconds), bytes(load.weight_bytes)]);
        }
        out += &loads.to_string();
        let mut phases = Table::new(&["phase", "median s", "best s", "TFLOP", "TFLOP/s", "beyond weights"]);
        for phase in &self.phases {
            let flops: f64 = phase.operations.iter().map(|op| op.flops).sum();
            phases.row([
                phase.phase.clone(),
                seconds(phase.median),
                seconds(phase.best),
                format!("{:.2}", flops / 1e12),
                rate(flops, phase.median, 1e12),
                phase.memory_beyond_weights.map_or("–".into(), bytes),
            ]);
        }
        out += &phases.to_string();
        for phase in &self.phases {
            out += &self.operations_table(phase, by_size);
        }
        for note in &self.notes {
            out += &format!("note: {note}\n");
        }
        out
    }

    fn operations_table(&self, phase: &PhaseResult, by_size: bool) -> String {
        let peak = |name: Option<&str>| name.and_then(|name| self.peaks.get(name).copied());
        let (compute, memory) = (peak(self.compute_peak), peak(self.memory_peak));
        let of_peak = |rate: f64, peak: Option<f64>| match peak {
            Some(peak) if rate > 0.0 && peak > 0.0 => format!("{:.0} %", 100.0 * rate / peak),
            _ => String::new(),
        };
        let header = [phase.phase.as_str(), "calls", "ms", "share", "TFLOP/s", "of peak", "GB/s", "of peak"];
        let mut table = Table::new(&header);
        let all = if by_size { phase.operations.clone() } else { phase.by_operation() };
        let mut rest = phase.seconds.iter().sum::<f64>() / phase.seconds.len().max(1) as f64;
        let whole = rest;
        for op in &all {
            rest -= op.seconds;
            let per_second = |amount: f64| if op.seconds > 0.0 { amount / op.seconds } else { 0.0 };
            let name = if by_size { format!("{} {}", op.operation, op.size) } else { op.operation.clone() };
            table.row([
                name,
                format!("{:.0}", op.calls),
                format!("{:.2}", op.seconds * 1e3),
                format!("{:.1} %", 100.0 * op.seconds / whole),
                if op.flops > 0.0 { rate(op.flops, op.seconds, 1e12) } else { String::new() },
                of_peak(per_second(op.flops), compute),
                if op.bytes > 0.0 { rate(op.bytes, op.seconds, 1e9) } else { String::new() },
                of_peak(per_second(op.bytes), memory),
            ]);
        }
        // On a GPU, operations timed one at a time may add up to more than the phase.
        if rest < 0.0 {
            return table.to_string();
        }
        let share = format!("{:.1} %", 100.0 * rest / whole);
        let none = String::new;
        table.row([
            "between operations".into(),
            none(),
            format!("{:.2}", rest * 1e3),
            share,
            none(),
            none(),
            none(),
            none(),
        ]);
        table.to_string()
    }
}

/// Formats the machine's peaks.
pub fn peaks_table(peaks: &BTreeMap<&'static str, f64>) -> String {
    let mut table = Table::new(&["peak", "rate"]);
    for (name, rate) in peaks {
        let text = if name.starts_with("memory") {
            format!("{:.1} GB/s", rate / 1e9)
        } else if name.contains("int8") {
            format!("{:.2} TOP/s", rate / 1e12)
        } else {
            format!("{:.2} TFLOP/s", rate / 1e12)
        };
        table.row([(*name).into(), text]);
    }
    table.to_string()
}

fn seconds(s: f64) -> String {
    if s < 10.0 { format!("{s:.3}") } else { format!("{s:.1}") }
}

fn rate(amount: f64, seconds: f64, unit: f64) -> String {
    if seconds > 0.0 { format!("{:.2}", amount / seconds / unit) } else { String::new() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn operations_are_averaged_over_the_counted_runs() {
        let op = |op, detail: &str, ms| OpStats {
            op,
            detail: detail.into(),
            calls: 4,
            time: Duration::from_millis(ms),
            flops: 100,
            bytes: 10,
        };
        let ops = vec![op("linear", "a", 20), op("linear", "b", 60), op("add", "c", 40)];
        let phase = PhaseResult::new("step", vec![3.0, 1.0], None, ops, 2);
        assert_eq!((phase.median, phase.best), (2.0, 1.0));
        let sizes: Vec<_> =
            phase.operations.iter().map(|op| (op.size.as_str(), op.calls, op.flops)).collect();
        assert_eq!(sizes, [("b", 2.0, 50.0), ("c", 2.0, 50.0), ("a", 2.0, 50.0)]);
        let merged = phase.by_operation();
        assert_eq!((merged[0].operation.as_str(), merged[0].calls), ("linear", 4.0));
        assert!((merged[0].seconds - 0.04).abs() < 1e-9);
    }
}
