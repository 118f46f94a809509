// What happens to the sums of a product, in this order, as `params.flags` say:
// 1: times the row's scale; 2: times the column's; 4: plus the bias; 8: times the gate; 16: plus the residual; 32: plus the result
// so far. `columns` has the scales of all columns and then their biases; `residual` is laid out as the result.

fn finished(m: u32, n: u32, sum: f32) -> f32 {
    var value = sum * params.scale;
    let column = params.first_column + n;
    if ((params.flags & 1u) != 0u) {
        value *= read_row_scales(m);
    }
    if ((params.flags & 2u) != 0u) {
        value *= read_columns(column);
    }
    if ((params.flags & 4u) != 0u) {
        value += read_columns(params.all_columns + column);
    }
    if ((params.flags & 8u) != 0u) {
        value *= read_gate(column);
    }
    let at = m * params.y_stride + params.y_column + n;
    if ((params.flags & 16u) != 0u) {
        value += read_residual(at);
    }
    if ((params.flags & 32u) != 0u) {
        value += read_y(at);
    }
    return value;
}

// Two neighbouring columns of a row.
fn finish2(m: u32, n: u32, sums: vec2<f32>) {
    if (m >= params.rows || n >= params.outputs) {
        return;
    }
    let count = min(2u, params.outputs - n);
    var pair = vec2<f32>(finished(m, n, sums.x), 0.0);
    if (count > 1u) {
        pair.y = finished(m, n + 1u, sums.y);
    }
    write2_y(m * params.y_stride + params.y_column + n, pair, count);
}
