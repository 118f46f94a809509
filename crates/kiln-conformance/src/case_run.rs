//! One run of a case on one backend: creating the inputs and recording the results.

use kiln_ops::{Backend, Error, Residency, Result, RopeLayout, RopeTable, Tensor, TrainingBackend};
use kiln_tensor::{DType, HostLinear, HostTensor, Shape, f16};

use crate::Tolerance;
use crate::random::{Distribution, Random};

/// The calls of a case; written once, run on the candidate and on the reference.
pub(crate) trait Scenario: Send + Sync + 'static {
    fn run<B: TrainingBackend>(&self, t: &mut CaseRun<'_, B>) -> Result<()>;
}

/// Loads a layer to the device.
pub(crate) fn load<B: Backend>(b: &B, layer: HostLinear) -> Result<B::Weight> {
    b.load_weight(layer, Residency::Device)
}

/// A labelled outcome.
pub(crate) struct Record {
    pub label: String,
    pub outcome: Outcome,
}

/// The outcome of a call.
pub(crate) enum Outcome {
    /// A result, and its tolerance against the reference's.
    Tensor(HostTensor, Tolerance),
    /// Two computations gave the same bits.
    Identical,
    /// The call was rejected with this message for its arguments.
    Rejected(String),
    /// A failure, whatever the reference gives.
    Failed(String),
}

/// The run of a scenario on one backend: creates inputs and records outcomes.
pub(crate) struct CaseRun<'b, B: Backend> {
    pub b: &'b B,
    /// The dtype of the activations.
    pub dtype: DType,
    /// Whether results stay in f32. The reference computes on the same values as the candidate, but does not round its results
    /// to bf16, so that only the candidate's rounding counts.
    exact: bool,
    random: Random,
    records: Vec<Record>,
}

impl<'b, B: Backend> CaseRun<'b, B> {
    pub fn new(b: &'b B, name: &str, dtype: DType, exact: bool) -> Self {
        CaseRun { b, dtype, exact, random: Random::named(name), records: Vec::new() }
    }

    pub fn into_records(self) -> Vec<Record> {
        self.records
    }

    pub fn draw(&mut self, values: Distribution, shape: impl Into<Shape>) -> HostTensor {
        self.random.tensor(values, shape)
    }

    /// Draws arbitrary bytes.
    pub fn bytes(&mut self, count: usize) -> Vec<u8> {
        self.random.bytes(count)
    }

    /// Draws an activation and uploads it.
    pub fn activation(&mut self, values: Distribution, shape: impl Into<Shape>) -> Result<B::Tensor> {
        let host = self.draw(values, shape);
        self.upload_activation(&host)
    }

    pub fn upload_activation(&self, host: &HostTensor) -> Result<B::Tensor> {
        let dtype = if self.exact { DType::F32 } else { self.dtype };
        self.b.upload(&host.to_dtype(self.dtype)?, dtype)
    }

    /// Draws a parameter and uploads it, in f32.
    pub fn parameter(&mut self, values: Distribution, shape: impl Into<Shape>) -> Result<B::Tensor> {
        let host = self.draw(values, shape);
        self.b.upload(&host, DType::F32)
    }

    /// Draws a host tensor of the dtype that a weight file stores.
    pub fn stored(
        &mut self,
        values: Distribution,
        shape: impl Into<Shape>,
        dtype: DType,
    ) -> Result<HostTensor> {
        let host = self.draw(values, shape);
        let elements = host.to_f32()?;
        let bytes: Vec<u8> = match dtype {
            DType::F16 => elements.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()).collect(),
            DType::F64 => elements.iter().flat_map(|&v| f64::from(v).to_le_bytes()).collect(),
            dtype => return Ok(host.to_dtype(dtype)?),
        };
        Ok(HostTensor::new(dtype, host.shape(), bytes.into())?)
    }

    /// Draws a rotary table: cosines and sines of random angles.
    pub fn rope(&mut self, tokens: usize, half: usize, pairs: RopeLayout) -> Result<RopeTable<B::Tensor>> {
        let angles = self.draw(crate::random::NORMAL.scaled(3.0), [tokens, half]);
        let upload = |f: fn(f32) -> f32| -> Result<B::Tensor> {
            let values = angles.to_f32()?.iter().map(|&a| f(a)).collect();
            self.b.upload(&HostTensor::from_f32([tokens, half], values)?, DType::F32)
        };
        Ok(RopeTable { cos: upload(f32::cos)?, sin: upload(f32::sin)?, pairs })
    }

    /// Records a result of the activations' dtype.
    pub fn record(&mut self, label: impl Into<String>, x: &B::Tensor, tolerance: Tolerance) -> Result<()> {
        let dtype = if self.exact { DType::F32 } else { self.dtype };
        self.record_as(label, x, dtype, tolerance)
    }

    /// Records whether two computations gave the same bits.
    pub fn record_identical(&mut self, label: impl Into<String>, x: &B::Tensor, y: &B::Tensor) -> Result<()> {
        let (x, y) = (self.b.download(x)?, self.b.download(y)?);
        let same = (x.dtype(), x.shape(), x.bytes()) == (y.dtype(), y.shape(), y.bytes());
        let outcome = if same {
            Outcome::Identical
        } else {
            Outcome::Failed("two computations of the same result differ".into())
        };
        self.records.push(Record { label: label.into(), outcome });
        Ok(())
    }

    /// Records a result of a given dtype.
    pub fn record_as(
        &mut self,
        label: impl Into<String>,
        x: &B::Tensor,
        dtype: DType,
        tolerance: Tolerance,
    ) -> Result<()> {
        let host = self.b.download(x)?;
        let outcome = if x.dtype() != dtype {
            Outcome::Failed(format!("the result is {}, expected {dtype}", x.dtype()))
        } else if (host.dtype(), host.shape()) != (x.dtype(), x.shape()) {
            let (dtype, shape) = (x.dtype(), x.shape());
            Outcome::Failed(format!("downloaded {dtype} {shape} as {} {}", host.dtype(), host.shape()))
        } else {
            Outcome::Tensor(host, tolerance)
        };
        self.records.push(Record { label: label.into(), outcome });
        Ok(())
    }

    /// Records bytes, which must equal the reference's.
    pub fn record_bytes(&mut self, label: impl Into<String>, bytes: &[u8]) -> Result<()> {
        let host = HostTensor::from_f32([bytes.len()], bytes.iter().map(|&b| b.into()).collect())?;
        self.records.push(Record { label: label.into(), outcome: Outcome::Tensor(host, Tolerance::EXACT) });
        Ok(())
    }

    /// Uploads zeros.
    pub fn zeros(&self, shape: impl Into<Shape>, dtype: DType) -> Result<B::Tensor> {
        self.b.upload(&HostTensor::zeros(shape), dtype)
    }

    /// Records a call that must be rejected for its arguments.
    pub fn reject<T>(&mut self, label: impl Into<String>, result: Result<T>) {
        let outcome = match result {
            Err(e @ Error::Arguments { .. }) => Outcome::Rejected(e.to_string()),
            Err(other) => Outcome::Failed(format!("expected Error::Arguments, found: {other}")),
            Ok(_) => Outcome::Failed("accepted".into()),
        };
        self.records.push(Record { label: label.into(), outcome });
    }
}
