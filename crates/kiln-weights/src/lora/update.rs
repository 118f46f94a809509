//! The update of a weight as a LoRA file stores it: low-rank, LoKr, LoHa, or the full difference.

use kiln_tensor::{DType, HostTensor, vector};

use rayon::prelude::*;

use super::LoraProblem;
use super::keys::{ModuleKeys, TensorRole};
use super::unused::UnusedKind;
use crate::{Error, Result, WeightSource};

/// A tensor and its key.
#[derive(Clone, Debug)]
pub(super) struct KeyedTensor {
    pub key: String,
    pub tensor: HostTensor,
    /// Whether it is stored with scales and all zero.
    pub is_zero: bool,
}

/// A matrix that a 1 × 1 convolution has in place of a linear layer is the same matrix.
pub(super) fn squeezed(dims: &[usize]) -> &[usize] {
    match dims {
        [matrix @ .., 1, 1] if matrix.len() == 2 => matrix,
        dims => dims,
    }
}

impl KeyedTensor {
    /// Reads a tensor of a float type, whose values must be finite.
    pub fn read(source: &WeightSource, key: &str) -> Result<KeyedTensor> {
        let problem = |p| Error::Lora { file: source.path().to_owned(), problem: Box::new(p) };
        let unusable =
            |e| Error::Tensor { file: source.path().to_owned(), tensor: key.to_owned(), source: e };
        let tensor = source.tensor(key)?;
        let (key, dtype) = (key.to_owned(), source.entry(key).map_or(tensor.dtype(), |(dtype, _)| dtype));
        if !matches!(tensor.dtype(), DType::F32 | DType::BF16 | DType::F16 | DType::F64) {
            let expected = "f32, bf16, f16, f64 or fp8";
            return Err(problem(LoraProblem::DType { key, dtype: tensor.dtype(), expected }));
        }
        let tensor = tensor.reshape(squeezed(tensor.shape().dims())).map_err(unusable)?;
        let largest = largest(&tensor).map_err(unusable)?;
        if !largest.is_finite() {
            return Err(problem(LoraProblem::NotFinite { key, dtype }));
        }
        let is_zero = largest == 0.0 && source.packed_format(&key).is_some();
        Ok(KeyedTensor { key, tensor, is_zero })
    }

    pub fn size(&self) -> [usize; 2] {
        [self.tensor.shape().rows(), self.tensor.shape().last()]
    }
}

/// The largest magnitude in a tensor, as f32; NaN or infinity if there is one.
fn largest(tensor: &HostTensor) -> kiln_tensor::Result<f32> {
    const CHUNK: usize = 1 << 18;
    let (flat, count) = (tensor.reshape([tensor.numel()])?, tensor.numel());
    let of_chunk = |index: usize| {
        let values = flat.rows(index * CHUNK..count.min((index + 1) * CHUNK))?;
        Ok(vector::max_abs_or_nan(&values.to_f32()?))
    };
    let largest = |a: f32, b: f32| if a.is_nan() || b <= a { a } else { b };
    (0..count.div_ceil(CHUNK)).into_par_iter().map(of_chunk).try_reduce(|| 0.0, |a, b| Ok(largest(a, b)))
}

/// A factor of a LoKr: one matrix, or the product of two.
#[derive(Clone, Debug)]
pub(super) enum Factor {
    Whole(KeyedTensor),
    Product(KeyedTensor, KeyedTensor),
}

impl Factor {
    pub fn size(&self) -> [usize; 2] {
        match self {
            Factor::Whole(matrix) => matrix.size(),
            Factor::Product(a, b) => [a.size()[0], b.size()[1]],
        }
    }

    fn rank(&self) -> Option<usize> {
        match self {
            Factor::Whole(_) => None,
            Factor::Product(_, b) => Some(b.size()[0]),
        }
    }

    fn key(&self) -> &str {
        match self {
            Factor::Whole(matrix) | Factor::Product(matrix, _) => &matrix.key,
        }
    }
}

/// The update of a weight, without its scale.
#[derive(Clone, Debug)]
pub(super) enum Update {
    /// `up · down`.
    LowRank { down: KeyedTensor, up: KeyedTensor },
    /// LoKr: the Kronecker product.
    Kron { left: Factor, right: Factor },
    /// LoHa: the elementwise product of two low-rank products.
    Hadamard { first: [KeyedTensor; 2], second: [KeyedTensor; 2] },
    /// The full difference.
    Full(KeyedTensor),
}

impl Update {
    /// Reads the tensors of a module, and checks that they fit together.
    pub fn read(source: &WeightSource, keys: &ModuleKeys<'_>) -> Result<Update> {
        let reader = Reader { source, keys };
        let has = |roles: &[TensorRole]| roles.iter().find_map(|role| keys.tensors.get(role).copied());
        const KRON: [TensorRole; 6] = [
            TensorRole::LokrW1,
            TensorRole::LokrW1A,
            TensorRole::LokrW1B,
            TensorRole::LokrW2,
            TensorRole::LokrW2A,
            TensorRole::LokrW2B,
        ];
        let kinds = [
            has(&[TensorRole::Down, TensorRole::Up]),
            has(&KRON),
            has(&[TensorRole::HadaW1A, TensorRole::HadaW1B, TensorRole::HadaW2A, TensorRole::HadaW2B]),
            has(&[TensorRole::Diff]),
        ];
        let mut present = kinds.into_iter().flatten();
        if let (Some(first), Some(second)) = (present.next(), present.next()) {
            let (first, second) = (first.to_owned(), second.to_owned());
            return Err(reader.error(LoraProblem::Duplicate { first, second }));
        }
        match kinds {
            [_, Some(_), ..] => Ok(Update::Kron {
                left: reader.factor(TensorRole::LokrW1, TensorRole::LokrW1A, TensorRole::LokrW1B)?,
                right: reader.factor(TensorRole::LokrW2, TensorRole::LokrW2A, TensorRole::LokrW2B)?,
            }),
            [_, _, Some(_), _] => {
                let first = reader.product(TensorRole::HadaW1A, TensorRole::HadaW1B)?;
                let second = reader.product(TensorRole::HadaW2A, TensorRole::HadaW2B)?;
                reader.check_same_size(&first, &second)?;
                Ok(Update::Hadamard { first, second })
            }
            [.., Some(_)] => Ok(Update::Full(reader.matrix(TensorRole::Diff)?)),
            // Also if there is only an alpha: then the matrices are missing.
            _ => {
                keys.require(TensorRole::Down).map_err(|p| reader.error(p))?;
                let [up, down] = reader.product(TensorRole::Up, TensorRole::Down)?;
                Ok(Update::LowRank { down, up })
            }
        }
    }

    /// Rows and columns of the weight it changes; `None` on overflow.
    pub fn size(&self) -> Option<[usize; 2]> {
        Some(match self {
            Update::LowRank { down, up } => [up.size()[0], down.size()[1]],
            Update::Kron { left, right } => {
                let ([a, b], [c, d]) = (left.size(), right.size());
                [a.checked_mul(c)?, b.checked_mul(d)?]
            }
            Update::Hadamard { first: [a, b], .. } => [a.size()[0], b.size()[1]],
            Update::Full(matrix) => matrix.size(),
        })
    }

    /// The rank, which also divides alpha; `None` for full-rank updates.
    pub fn rank(&self) -> Option<usize> {
        match self {
            Update::LowRank { down, .. } => Some(down.size()[0]),
            Update::Kron { left, right } => right.rank().or(left.rank()),
            Update::Hadamard { first: [_, b], .. } => Some(b.size()[0]),
            Update::Full(_) => None,
        }
    }

    /// Its kind, as trainers call it.
    pub fn kind(&self) -> &'static str {
        match self {
            Update::LowRank { .. } => "LoRA",
            Update::Kron { .. } => "LoKr",
            Update::Hadamard { .. } => "LoHa",
            Update::Full(_) => "difference",
        }
    }

    /// All of its tensors.
    pub fn tensors(&self) -> Vec<&KeyedTensor> {
        fn of_factor(factor: &Factor) -> Vec<&KeyedTensor> {
            match factor {
                Factor::Whole(matrix) => vec![matrix],
                Factor::Product(a, b) => vec![a, b],
            }
        }
        match self {
            Update::LowRank { down, up } => vec![down, up],
            Update::Kron { left, right } => [of_factor(left), of_factor(right)].concat(),
            Update::Hadamard { first, second } => first.iter().chain(second).collect(),
            Update::Full(matrix) => vec![matrix],
        }
    }

    /// The keys that determine its rows and its columns, for messages.
    pub fn keys(&self) -> [&str; 2] {
        match self {
            Update::LowRank { down, up } => [&up.key, &down.key],
            Update::Kron { left, right } => [left.key(), right.key()],
            Update::Hadamard { first: [a, b], .. } => [&a.key, &b.key],
            Update::Full(matrix) => [&matrix.key; 2],
        }
    }
}

struct Reader<'a> {
    source: &'a WeightSource,
    keys: &'a ModuleKeys<'a>,
}

impl Reader<'_> {
    fn error(&self, problem: LoraProblem) -> Error {
        Error::Lora { file: self.source.path().to_owned(), problem: Box::new(problem) }
    }

    fn matrix(&self, role: TensorRole) -> Result<KeyedTensor> {
        let key = self.keys.require(role).map_err(|p| self.error(p))?;
        let matrix = KeyedTensor::read(self.source, key)?;
        if matrix.tensor.shape().rank() != 2 || matrix.tensor.numel() == 0 {
            let (key, found) = (matrix.key, matrix.tensor.shape().clone());
            let expected = "a matrix that is not empty";
            return Err(self.error(LoraProblem::UnexpectedShape { key, found, expected }));
        }
        Ok(matrix)
    }

    /// Reads two matrices that can be multiplied.
    fn product(&self, left: TensorRole, right: TensorRole) -> Result<[KeyedTensor; 2]> {
        let (left, right) = (self.matrix(left)?, self.matrix(right)?);
        let ([rows, inner], [rank, cols]) = (left.size(), right.size());
        if inner != rank && rows == cols && rows < rank && cols < inner {
            return Err(self.error(LoraProblem::Swapped {
                down: right.key,
                down_shape: right.tensor.shape().clone(),
                up: left.key,
                up_shape: left.tensor.shape().clone(),
            }));
        }
        if inner != rank {
            return Err(self.error(LoraProblem::Rank {
                down: right.key,
                rank,
                down_shape: right.tensor.shape().clone(),
                up: left.key,
                up_shape: left.tensor.shape().clone(),
            }));
        }
        Ok([left, right])
    }

    fn factor(&self, whole: TensorRole, left: TensorRole, right: TensorRole) -> Result<Factor> {
        let has = |role| self.keys.tensors.contains_key(&role);
        if has(left) || has(right) {
            if let (Some(first), Some(second)) = (
                self.keys.tensors.get(&whole),
                self.keys.tensors.get(&left).or(self.keys.tensors.get(&right)),
            ) {
                let (first, second) = ((*first).to_owned(), (*second).to_owned());
                return Err(self.error(LoraProblem::Duplicate { first, second }));
            }
            let [left, right] = self.product(left, right)?;
            return Ok(Factor::Product(left, right));
        }
        Ok(Factor::Whole(self.matrix(whole)?))
    }

    fn check_same_size(&self, first: &[KeyedTensor; 2], second: &[KeyedTensor; 2]) -> Result<()> {
        for (axis, expected) in [(0, "as many rows as its partner"), (1, "as many columns as its partner")] {
            if first[axis].size()[axis] != second[axis].size()[axis] {
                let KeyedTensor { key, tensor, .. } = second[axis].clone();
                let found = tensor.shape().clone();
                return Err(self.error(LoraProblem::UnexpectedShape { key, found, expected }));
            }
        }
        Ok(())
    }
}

/// What a module is for, if the shapes of its tensors tell that it does not change a matrix.
pub(super) fn unused_kind(source: &WeightSource, module: &ModuleKeys<'_>) -> Option<UnusedKind> {
    let rank = |key: &str| source.entry(key).map_or(2, |(_, shape)| squeezed(shape.dims()).len());
    let matrices =
        module.tensors.iter().filter(|(role, _)| !matches!(role, TensorRole::Alpha | TensorRole::Magnitude));
    let ranks: Vec<usize> = matrices.map(|(_, key)| rank(key)).collect();
    let cores = [TensorRole::Core1, TensorRole::Core2];
    let has_core = cores.iter().any(|role| module.tensors.contains_key(role));
    if has_core || ranks.iter().any(|rank| *rank > 2) {
        return Some(UnusedKind::Convolution);
    }
    let vector = module.tensors.get(&TensorRole::Diff).is_some_and(|key| rank(key) < 2);
    (vector && ranks.len() == 1).then_some(UnusedKind::NormOrBias)
}
