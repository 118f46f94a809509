use kiln_ops::{Backend, Error, Result, RopePairs, RopeTable, Tensor};
use kiln_tensor::{DType, HostTensor, Shape, f16};

use crate::Tolerance;
use crate::random::{Random, Values};

/// What a case does on a backend; written once, run on the candidate and on the reference.
pub(crate) trait Scenario: Send + Sync + 'static {
    fn run<B: Backend>(&self, t: &mut Bench<'_, B>) -> Result<()>;
}

/// Something a case recorded.
pub(crate) struct Record {
    pub label: String,
    pub outcome: Outcome,
}

pub(crate) enum Outcome {
    /// A result, and how near the reference's it has to be.
    Tensor(HostTensor, Tolerance),
    /// Two ways gave the same bits.
    Same,
    /// The words with which a call was refused as bad arguments.
    Refused(String),
    /// What is wrong in any case, whatever the reference says.
    Broken(String),
}

/// Where a scenario runs: makes inputs, hands them to one backend, records what comes out.
pub(crate) struct Bench<'b, B: Backend> {
    pub b: &'b B,
    /// The dtype of the activations.
    pub dtype: DType,
    /// The reference computes on the same values as the candidate, but keeps its results in f32 instead of rounding
    /// them to bf16, so that the candidate's rounding is the only one.
    exact: bool,
    random: Random,
    records: Vec<Record>,
}

impl<'b, B: Backend> Bench<'b, B> {
    pub fn new(b: &'b B, name: &str, dtype: DType, exact: bool) -> Self {
        Bench { b, dtype, exact, random: Random::named(name), records: Vec::new() }
    }

    pub fn into_records(self) -> Vec<Record> {
        self.records
    }

    pub fn draw(&mut self, values: Values, shape: impl Into<Shape>) -> HostTensor {
        self.random.tensor(values, shape)
    }

    /// Bytes of any value.
    pub fn bytes(&mut self, count: usize) -> Vec<u8> {
        self.random.bytes(count)
    }

    /// An activation on the backend.
    pub fn activation(&mut self, values: Values, shape: impl Into<Shape>) -> Result<B::Tensor> {
        let host = self.draw(values, shape);
        self.activation_of(&host)
    }

    pub fn activation_of(&self, host: &HostTensor) -> Result<B::Tensor> {
        let dtype = if self.exact { DType::F32 } else { self.dtype };
        self.b.upload(&host.to_dtype(self.dtype)?, dtype)
    }

    /// A parameter on the backend.
    pub fn parameter(&mut self, values: Values, shape: impl Into<Shape>) -> Result<B::Tensor> {
        let host = self.draw(values, shape);
        self.b.upload(&host, DType::F32)
    }

    /// A host tensor as a weight file holds it.
    pub fn stored(&mut self, values: Values, shape: impl Into<Shape>, dtype: DType) -> Result<HostTensor> {
        let host = self.draw(values, shape);
        let elements = host.to_f32()?;
        let bytes: Vec<u8> = match dtype {
            DType::F16 => elements.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()).collect(),
            DType::F64 => elements.iter().flat_map(|&v| f64::from(v).to_le_bytes()).collect(),
            dtype => return Ok(host.to_dtype(dtype)?),
        };
        Ok(HostTensor::new(dtype, host.shape(), bytes.into())?)
    }

    /// Cosines and sines of random angles.
    pub fn rope(&mut self, tokens: usize, half: usize, pairs: RopePairs) -> Result<RopeTable<B>> {
        let angles = self.draw(crate::random::NORMAL.times(3.0), [tokens, half]);
        let of = |f: fn(f32) -> f32| -> Result<B::Tensor> {
            let values = angles.to_f32()?.iter().map(|&a| f(a)).collect();
            self.b.upload(&HostTensor::from_f32([tokens, half], values)?, DType::F32)
        };
        Ok(RopeTable { cos: of(f32::cos)?, sin: of(f32::sin)?, pairs })
    }

    /// Records a result of the activations' dtype.
    pub fn put(&mut self, label: impl Into<String>, x: &B::Tensor, tolerance: Tolerance) -> Result<()> {
        let dtype = if self.exact { DType::F32 } else { self.dtype };
        self.put_as(label, x, dtype, tolerance)
    }

    /// Records that two ways gave the same bits, or didn't.
    pub fn same(&mut self, label: impl Into<String>, x: &B::Tensor, y: &B::Tensor) -> Result<()> {
        let (x, y) = (self.b.download(x)?, self.b.download(y)?);
        let same = (x.dtype(), x.shape(), x.bytes()) == (y.dtype(), y.shape(), y.bytes());
        let differ = || Outcome::Broken("two ways to the same result differ".into());
        let outcome = if same { Outcome::Same } else { differ() };
        self.records.push(Record { label: label.into(), outcome });
        Ok(())
    }

    /// Records a result of a certain dtype.
    pub fn put_as(
        &mut self,
        label: impl Into<String>,
        x: &B::Tensor,
        dtype: DType,
        tolerance: Tolerance,
    ) -> Result<()> {
        let host = self.b.download(x)?;
        let outcome = if x.dtype() != dtype {
            Outcome::Broken(format!("the result is {}, expected {dtype}", x.dtype()))
        } else if (host.dtype(), host.shape()) != (x.dtype(), x.shape()) {
            let (there, here) = ((x.dtype(), x.shape()), (host.dtype(), host.shape()));
            Outcome::Broken(format!("downloaded {} {} as {} {}", there.0, there.1, here.0, here.1))
        } else {
            Outcome::Tensor(host, tolerance)
        };
        self.records.push(Record { label: label.into(), outcome });
        Ok(())
    }

    /// Records bytes, which have to be the reference's.
    pub fn put_bytes(&mut self, label: impl Into<String>, bytes: &[u8]) -> Result<()> {
        let host = HostTensor::from_f32([bytes.len()], bytes.iter().map(|&b| b.into()).collect())?;
        self.records.push(Record { label: label.into(), outcome: Outcome::Tensor(host, Tolerance::EXACT) });
        Ok(())
    }

    /// Records a call that has to be refused.
    pub fn refused<T>(&mut self, label: impl Into<String>, result: Result<T>) {
        let outcome = match result {
            Err(e @ Error::Arguments { .. }) => Outcome::Refused(e.to_string()),
            Err(other) => Outcome::Broken(format!("expected Error::Arguments, found: {other}")),
            Ok(_) => Outcome::Broken("accepted".into()),
        };
        self.records.push(Record { label: label.into(), outcome });
    }
}
