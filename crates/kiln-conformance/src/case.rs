use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, OnceLock};

use kiln_base::lock;
use kiln_ops::{Backend, Reference};
use kiln_tensor::DType;

use crate::bench::{Bench, Outcome, Record, Scenario};

type Run<B> = Box<dyn Fn(&B) -> Result<Vec<Record>, String> + Send + Sync>;
type Expected = Arc<OnceLock<Result<Vec<Record>, String>>>;

/// One situation that a backend of type `B` has to handle as the reference does.
pub struct Case<B> {
    name: String,
    candidate: Run<B>,
    reference: Run<Reference>,
}

impl<B: Backend> Case<B> {
    pub(crate) fn new(name: String, dtype: DType, scenario: Arc<impl Scenario>) -> Self {
        let candidate = record(name.clone(), dtype, Arc::clone(&scenario), false);
        let reference = record(name.clone(), dtype, scenario, true);
        Case { name, candidate, reference }
    }

    /// What is tried: operation, situation and dtype of the activations, such as `rms_norm/odd_tails/bf16`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Runs the case; an `Err` says all that was wrong, a line each.
    pub fn check(&self, backend: &B) -> Result<(), String> {
        let found = (self.candidate)(backend)?;
        let expected = self.expected();
        let expected = expected.get_or_init(|| (self.reference)(&Reference::new())).as_ref();
        let expected = expected.map_err(|e| format!("the reference itself: {e}"))?;
        if found.len() != expected.len() {
            return Err(format!("{} results, expected {}", found.len(), expected.len()));
        }
        complaints(found.iter().zip(expected).map(|(found, expected)| compare(found, expected)))
    }

    /// Runs the case on two backends, whose results have to have the same bytes: one thread and many, say.
    pub fn check_bits(&self, a: &B, b: &B) -> Result<(), String> {
        let (first, second) = ((self.candidate)(a)?, (self.candidate)(b)?);
        complaints(first.iter().zip(&second).map(|(first, second)| match (&first.outcome, &second.outcome) {
            (Outcome::Tensor(x, _), Outcome::Tensor(y, _)) if x != y => {
                Err(format!("{}: the bytes differ", first.label))
            }
            _ => Ok(()),
        }))
    }

    /// The reference's records, computed once however many backends and instruction sets ask for them.
    fn expected(&self) -> Expected {
        static ALL: LazyLock<Mutex<HashMap<String, Expected>>> = LazyLock::new(Mutex::default);
        let mut all = lock(&ALL);
        Arc::clone(all.entry(self.name.clone()).or_default())
    }
}

fn record<B: Backend>(name: String, dtype: DType, scenario: Arc<impl Scenario>, exact: bool) -> Run<B> {
    Box::new(move |backend| {
        let mut bench = Bench::new(backend, &name, dtype, exact);
        scenario.run(&mut bench).map_err(|e| e.to_string())?;
        Ok(bench.into_records())
    })
}

fn compare(found: &Record, expected: &Record) -> Result<(), String> {
    let said = match (&found.outcome, &expected.outcome) {
        (Outcome::Broken(what), _) => Err(what.clone()),
        (_, Outcome::Broken(what)) => Err(format!("the reference itself: {what}")),
        (Outcome::Tensor(found, tolerance), Outcome::Tensor(expected, _)) => tolerance.check(found, expected),
        (Outcome::Same, Outcome::Same) => Ok(()),
        (Outcome::Refused(found), Outcome::Refused(expected)) if found == expected => Ok(()),
        (Outcome::Refused(found), Outcome::Refused(expected)) => {
            Err(format!("refused with `{found}`, expected `{expected}`"))
        }
        _ => Err("one is a refusal, the other a result".into()),
    };
    said.map_err(|what| format!("{}: {what}", found.label))
}

fn complaints(results: impl Iterator<Item = Result<(), String>>) -> Result<(), String> {
    let all: Vec<String> = results.filter_map(Result::err).collect();
    if all.is_empty() { Ok(()) } else { Err(all.join("\n")) }
}
