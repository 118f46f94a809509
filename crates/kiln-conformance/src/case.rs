//! A case: a scenario with a name and a dtype, and the comparison of its outcomes.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, OnceLock};

use kiln_base::lock;
use kiln_ops::{Backend, Reference, TrainingBackend};
use kiln_tensor::DType;

use crate::case_run::{CaseRun, Outcome, Record, Scenario};

type Run<B> = Box<dyn Fn(&B) -> Result<Vec<Record>, String> + Send + Sync>;
type Expected = Arc<OnceLock<Result<Vec<Record>, String>>>;

/// A test case that compares a backend of type `B` with the reference.
pub struct Case<B> {
    name: String,
    candidate: Run<B>,
    reference: Run<Reference>,
}

impl<B: TrainingBackend> Case<B> {
    pub(crate) fn new(name: String, dtype: DType, scenario: Arc<impl Scenario>) -> Self {
        let other = Arc::clone(&scenario);
        let candidate = runner(name.clone(), dtype, false, move |t: &mut CaseRun<'_, B>| scenario.run(t));
        let reference = runner(name.clone(), dtype, true, move |t: &mut CaseRun<'_, Reference>| other.run(t));
        Case { name, candidate, reference }
    }

    /// Operation, situation and dtype of the activations, such as `rms_norm/odd_tails/bf16`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Runs the case; an `Err` lists everything that is wrong, one line each.
    pub fn check(&self, backend: &B) -> Result<(), String> {
        self.check_found(&(self.candidate)(backend)?)
    }

    /// Runs the case on two backends whose results must be bit-identical, such as one with many threads and one with one,
    /// and checks the first one's.
    pub fn check_both(&self, a: &B, b: &B) -> Result<(), String> {
        let found = (self.candidate)(a)?;
        self.check_found(&found)?;
        same_bits(&found, &(self.candidate)(b)?)
    }

    /// Runs the case on two backends whose results must be bit-identical.
    pub fn check_bits(&self, a: &B, b: &B) -> Result<(), String> {
        same_bits(&(self.candidate)(a)?, &(self.candidate)(b)?)
    }

    fn check_found(&self, found: &[Record]) -> Result<(), String> {
        let expected = self.expected();
        let expected = expected.get_or_init(|| (self.reference)(&Reference::new())).as_ref();
        let expected = expected.map_err(|e| format!("the reference failed: {e}"))?;
        if found.len() != expected.len() {
            return Err(format!("{} results, expected {}", found.len(), expected.len()));
        }
        all_errors(found.iter().zip(expected).map(|(found, expected)| compare(found, expected)))
    }

    /// The reference's records, computed once for all backends and instruction sets.
    fn expected(&self) -> Expected {
        static EXPECTED: LazyLock<Mutex<HashMap<String, Expected>>> = LazyLock::new(Mutex::default);
        let mut expected = lock(&EXPECTED);
        Arc::clone(expected.entry(self.name.clone()).or_default())
    }
}

/// Returns a function that runs a scenario on a backend.
fn runner<B: Backend>(
    name: String,
    dtype: DType,
    exact: bool,
    scenario: impl Fn(&mut CaseRun<'_, B>) -> kiln_ops::Result<()> + Send + Sync + 'static,
) -> Run<B> {
    Box::new(move |backend| {
        let mut run = CaseRun::new(backend, &name, dtype, exact);
        scenario(&mut run).map_err(|e| e.to_string())?;
        Ok(run.into_records())
    })
}

fn compare(found: &Record, expected: &Record) -> Result<(), String> {
    let result = match (&found.outcome, &expected.outcome) {
        (Outcome::Failed(what), _) => Err(what.clone()),
        (_, Outcome::Failed(what)) => Err(format!("the reference failed: {what}")),
        (Outcome::Tensor(found, tolerance), Outcome::Tensor(expected, _)) => tolerance.check(found, expected),
        (Outcome::Identical, Outcome::Identical) => Ok(()),
        (Outcome::Rejected(found), Outcome::Rejected(expected)) if found == expected => Ok(()),
        (Outcome::Rejected(found), Outcome::Rejected(expected)) => {
            Err(format!("rejected with `{found}`, expected `{expected}`"))
        }
        _ => Err("one call was rejected, the other was not".into()),
    };
    result.map_err(|what| format!("{}: {what}", found.label))
}

fn same_bits(first: &[Record], second: &[Record]) -> Result<(), String> {
    all_errors(first.iter().zip(second).map(|(first, second)| match (&first.outcome, &second.outcome) {
        (Outcome::Tensor(x, _), Outcome::Tensor(y, _)) if x != y => {
            Err(format!("{}: the bytes differ", first.label))
        }
        _ => Ok(()),
    }))
}

/// Joins all errors, one line each.
fn all_errors(results: impl Iterator<Item = Result<(), String>>) -> Result<(), String> {
    let all: Vec<String> = results.filter_map(Result::err).collect();
    if all.is_empty() { Ok(()) } else { Err(all.join("\n")) }
}
