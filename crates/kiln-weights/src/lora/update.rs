//! What a module adds to its weight, as the file has it.

use kiln_tensor::{DType, HostTensor};

use super::LoraProblem;
use super::keys::{Group, Part};
use crate::{Error, Result, WeightSource};

/// A tensor and its key.
#[derive(Clone, Debug)]
pub(super) struct Keyed {
    pub key: String,
    pub tensor: HostTensor,
}

impl Keyed {
    pub fn size(&self) -> [usize; 2] {
        [self.tensor.shape().rows(), self.tensor.shape().last()]
    }
}

/// A matrix, perhaps as a product of two.
#[derive(Clone, Debug)]
pub(super) enum Factor {
    Whole(Keyed),
    Product(Keyed, Keyed),
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

/// The change of a weight, without its scale.
#[derive(Clone, Debug)]
pub(super) enum Update {
    /// `up · down`.
    LowRank { down: Keyed, up: Keyed },
    /// LoKr: every element of `left` times the whole of `right`.
    Kron { left: Factor, right: Factor },
    /// LoHa: the products of two pairs, element by element.
    Hadamard { first: [Keyed; 2], second: [Keyed; 2] },
    /// The difference itself.
    Full(Keyed),
}

impl Update {
    /// Reads the parts of a module, and checks that they fit together.
    pub fn read(source: &WeightSource, group: &Group<'_>) -> Result<Update> {
        let reader = Reader { source, group };
        let has = |parts: &[Part]| parts.iter().find_map(|part| group.parts.get(part).copied());
        const KRON: [Part; 6] = [
            Part::KronLeft,
            Part::KronLeftA,
            Part::KronLeftB,
            Part::KronRight,
            Part::KronRightA,
            Part::KronRightB,
        ];
        let kinds = [
            has(&[Part::Down, Part::Up]),
            has(&KRON),
            has(&[Part::Hada1A, Part::Hada1B, Part::Hada2A, Part::Hada2B]),
            has(&[Part::Full]),
        ];
        let mut there = kinds.into_iter().flatten();
        if let (Some(first), Some(second)) = (there.next(), there.next()) {
            let (first, second) = (first.to_owned(), second.to_owned());
            return Err(reader.error(LoraProblem::Twice { first, second }));
        }
        match kinds {
            [_, Some(_), ..] => Ok(Update::Kron {
                left: reader.factor(Part::KronLeft, Part::KronLeftA, Part::KronLeftB)?,
                right: reader.factor(Part::KronRight, Part::KronRightA, Part::KronRightB)?,
            }),
            [_, _, Some(_), _] => {
                let first = reader.product(Part::Hada1A, Part::Hada1B)?;
                let second = reader.product(Part::Hada2A, Part::Hada2B)?;
                reader.same_size(&first, &second)?;
                Ok(Update::Hadamard { first, second })
            }
            [.., Some(_)] => Ok(Update::Full(reader.matrix(Part::Full)?)),
            // Also where there is nothing but an alpha: then the matrices are missing.
            _ => {
                group.need(Part::Down).map_err(|p| reader.error(p))?;
                let [up, down] = reader.product(Part::Up, Part::Down)?;
                Ok(Update::LowRank { down, up })
            }
        }
    }

    /// Rows and columns of the weight it changes; `None` beyond what can be counted.
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

    /// The rank, which also divides alpha; `None` for updates that are whole matrices.
    pub fn rank(&self) -> Option<usize> {
        match self {
            Update::LowRank { down, .. } => Some(down.size()[0]),
            Update::Kron { left, right } => right.rank().or(left.rank()),
            Update::Hadamard { first: [_, b], .. } => Some(b.size()[0]),
            Update::Full(_) => None,
        }
    }

    /// What trainers call it.
    pub fn kind(&self) -> &'static str {
        match self {
            Update::LowRank { .. } => "LoRA",
            Update::Kron { .. } => "LoKr",
            Update::Hadamard { .. } => "LoHa",
            Update::Full(_) => "difference",
        }
    }

    /// Keys that say how many rows and columns it has, for messages.
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
    group: &'a Group<'a>,
}

impl Reader<'_> {
    fn error(&self, problem: LoraProblem) -> Error {
        Error::Lora { file: self.source.path().to_owned(), problem: Box::new(problem) }
    }

    fn matrix(&self, part: Part) -> Result<Keyed> {
        let key = self.group.need(part).map_err(|p| self.error(p))?;
        let tensor = self.source.tensor(key)?;
        check_float(key, &tensor).map_err(|p| self.error(p))?;
        if tensor.shape().rank() != 2 || tensor.numel() == 0 {
            let (key, found) = (key.to_owned(), tensor.shape().clone());
            let expected = "a matrix that is not empty";
            return Err(self.error(LoraProblem::NotThatShape { key, found, expected }));
        }
        Ok(Keyed { key: key.to_owned(), tensor })
    }

    /// Two matrices that can be multiplied.
    fn product(&self, left: Part, right: Part) -> Result<[Keyed; 2]> {
        let (left, right) = (self.matrix(left)?, self.matrix(right)?);
        let rank = right.size()[0];
        if left.size()[1] != rank {
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

    fn factor(&self, whole: Part, left: Part, right: Part) -> Result<Factor> {
        let has = |part| self.group.parts.contains_key(&part);
        if has(left) || has(right) {
            if let (Some(first), Some(second)) =
                (self.group.parts.get(&whole), self.group.parts.get(&left).or(self.group.parts.get(&right)))
            {
                let (first, second) = ((*first).to_owned(), (*second).to_owned());
                return Err(self.error(LoraProblem::Twice { first, second }));
            }
            let [left, right] = self.product(left, right)?;
            return Ok(Factor::Product(left, right));
        }
        Ok(Factor::Whole(self.matrix(whole)?))
    }

    fn same_size(&self, first: &[Keyed; 2], second: &[Keyed; 2]) -> Result<()> {
        for (axis, expected) in [(0, "as many rows as its partner"), (1, "as many columns as its partner")] {
            if first[axis].size()[axis] != second[axis].size()[axis] {
                let Keyed { key, tensor } = second[axis].clone();
                let found = tensor.shape().clone();
                return Err(self.error(LoraProblem::NotThatShape { key, found, expected }));
            }
        }
        Ok(())
    }
}

/// Refuses tensors that hold no real numbers.
pub(super) fn check_float(key: &str, tensor: &HostTensor) -> Result<(), LoraProblem> {
    match tensor.dtype() {
        DType::F32 | DType::BF16 | DType::F16 | DType::F64 => Ok(()),
        dtype => Err(LoraProblem::DType { key: key.to_owned(), dtype }),
    }
}
