//! The order of a text encoder's q and k rows in a file.
//!
//! transformers rotates a head's row `i` together with row `i + head_dim / 2`, llama.cpp rows `2i` and `2i + 1`: of models
//! without q and k norms it writes the rows in that order. A file with llama.cpp's names has llama.cpp's order, whoever
//! wrote it, so that every reader knows it from the names.

use kiln_tensor::Shape;
use kiln_tensor::packed::PackedTensor;

use super::options::{Options, TensorNames};
use crate::layout::Q_NORM;
use crate::{Component, Error, Result, WeightSource};

/// What is done to the rows of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RowOrder {
    Same,
    /// From transformers' order to llama.cpp's.
    Interleave {
        head_dim: usize,
    },
    /// From llama.cpp's order to transformers'.
    Deinterleave {
        head_dim: usize,
    },
}

impl RowOrder {
    /// The order of the tensor `name` of the model, which has this shape, in the file to write.
    pub fn of(source: &WeightSource, options: &Options, name: &str, shape: &Shape) -> Result<RowOrder> {
        let rotates = ["q_proj", "k_proj"].iter().any(|leaf| {
            let module = name.rsplit_once('.').map_or(name, |(module, _)| module);
            name.starts_with("model.layers.") && module.ends_with(&format!("self_attn.{leaf}"))
        });
        let has_norms = source.contains(Q_NORM);
        if options.component != Component::TextEncoder || !rotates || has_norms {
            return Ok(RowOrder::Same);
        }
        let head_dim = source.head_dim().unwrap_or(0);
        let rows = shape.dims().first().copied().unwrap_or(0);
        let to_llama_cpp = options.names == TensorNames::Original;
        if to_llama_cpp == source.has_interleaved_rotary() {
            return Ok(RowOrder::Same);
        }
        if head_dim == 0 || !head_dim.is_multiple_of(2) || !rows.is_multiple_of(head_dim) {
            return Err(Error::CannotSplit {
                file: source.path().to_owned(),
                tensor: name.to_owned(),
                found: shape.clone(),
                parts: format!("heads of {head_dim} rows"),
            });
        }
        Ok(if to_llama_cpp { RowOrder::Interleave { head_dim } } else { RowOrder::Deinterleave { head_dim } })
    }

    /// The source's row that becomes row `row`.
    pub fn source_row(self, row: usize) -> usize {
        match self {
            RowOrder::Same => row,
            RowOrder::Interleave { head_dim } => {
                let (head, i) = (row / head_dim, row % head_dim);
                head * head_dim + i % 2 * (head_dim / 2) + i / 2
            }
            RowOrder::Deinterleave { head_dim } => {
                let (head, i) = (row / head_dim, row % head_dim);
                head * head_dim + i % (head_dim / 2) * 2 + i / (head_dim / 2)
            }
        }
    }

    /// The rows of a matrix, or of a vector that is one row, in the file's order.
    pub fn apply(self, matrices: Vec<PackedTensor>) -> kiln_tensor::Result<Vec<PackedTensor>> {
        match (self, &matrices[..]) {
            (RowOrder::Same, _) => Ok(matrices),
            (_, [whole]) => {
                let row = |i| self.source_row(i);
                (0..whole.row_count()).map(|i| whole.rows(row(i)..row(i) + 1)).collect()
            }
            _ => Ok(matrices),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_order_undoes_the_other() {
        let (to, from) = (RowOrder::Interleave { head_dim: 6 }, RowOrder::Deinterleave { head_dim: 6 });
        let rows: Vec<usize> = (0..12).map(|row| to.source_row(row)).collect();
        assert_eq!(rows, [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]);
        assert!((0..12).all(|row| to.source_row(from.source_row(row)) == row));
    }
}
