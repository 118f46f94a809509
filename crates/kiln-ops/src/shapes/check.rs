use kiln_tensor::{DType, Shape};

use crate::{Error, Result, RowGroups, Tensor};

/// The operation whose arguments are checked; every error message starts with its name.
#[derive(Clone, Copy)]
pub(crate) struct Op(pub &'static str);

impl Op {
    pub fn fail<T>(self, what: String) -> Result<T> {
        Err(Error::Arguments { op: self.0, what })
    }

    /// Checks the first activation of a call, which decides the dtype.
    pub fn activation(self, name: &str, t: &impl Tensor) -> Result<DType> {
        match t.dtype() {
            dtype @ (DType::F32 | DType::BF16) => Ok(dtype),
            other => self.fail(format!("{name} is {other}, expected f32 or bf16")),
        }
    }

    /// Checks that a further activation has the dtype of the first.
    pub fn same_dtype(self, name: &str, t: &impl Tensor, dtype: DType) -> Result<()> {
        if t.dtype() != dtype {
            return self.fail(format!("{name} is {}, expected {dtype} like the first argument", t.dtype()));
        }
        Ok(())
    }

    /// Checks a parameter: f32 and of exactly this shape.
    pub fn parameter(self, name: &str, t: &impl Tensor, dims: &[usize]) -> Result<()> {
        if t.dtype() != DType::F32 {
            return self.fail(format!("{name} is {}, expected f32", t.dtype()));
        }
        self.shape(name, t.shape(), dims)
    }

    pub fn shape(self, name: &str, found: &Shape, expected: &[usize]) -> Result<()> {
        if found.dims() != expected {
            return self.fail(format!("{name} has shape {found}, expected {}", Shape::from(expected)));
        }
        Ok(())
    }

    pub fn matrix(self, name: &str, shape: &Shape) -> Result<[usize; 2]> {
        self.rank(name, shape, "[rows, columns]")
    }

    pub fn image(self, name: &str, shape: &Shape) -> Result<[usize; 3]> {
        self.rank(name, shape, "[height, width, channels]")
    }

    pub fn rank<const N: usize>(self, name: &str, shape: &Shape, expected: &str) -> Result<[usize; N]> {
        match shape.dims().try_into() {
            Ok(dims) => Ok(dims),
            Err(_) => self.fail(format!("{name} has shape {shape}, expected {expected}")),
        }
    }

    pub fn groups(self, groups: &RowGroups, rows: usize) -> Result<()> {
        if groups.rows() != rows {
            return self.fail(format!("the groups cover {} rows, expected {rows}", groups.rows()));
        }
        Ok(())
    }

    /// Adds sizes; overflow is an error.
    pub fn sum(self, what: &str, sizes: impl IntoIterator<Item = usize>) -> Result<usize> {
        match sizes.into_iter().try_fold(0usize, usize::checked_add) {
            Some(sum) => Ok(sum),
            None => self.fail(format!("the {what} overflow")),
        }
    }
}
