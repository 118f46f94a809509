// Division with IEEE's rounding, which WGSL does not promise. Scales of quantized rows must be the same on every device.

// a / b rounded to nearest even, for positive normal numbers with a normal quotient.
fn exact_divide(a: f32, b: f32) -> f32 {
    let a_bits = bitcast<u32>(a);
    let b_bits = bitcast<u32>(b);
    var exponent = i32(a_bits >> 23u) - i32(b_bits >> 23u) + 127;
    var rest = (a_bits & 0x7fffffu) | 0x800000u;
    let divisor = (b_bits & 0x7fffffu) | 0x800000u;
    if (rest < divisor) {
        rest <<= 1u;
        exponent -= 1;
    }
    // 1 + 24 bits of the quotient of the mantissas, in steps of 8 that keep the rest below 2³².
    var quotient = rest / divisor;
    rest = rest % divisor;
    #for step in 0..3
    rest <<= 8u;
    quotient = (quotient << 8u) | (rest / divisor);
    rest = rest % divisor;
    #end
    // The last bit is the one to round.
    let tail = select(0u, 1u, rest != 0u);
    let rounded = (quotient >> 1u) + (quotient & 1u & (tail | ((quotient >> 1u) & 1u)));
    // A carry into the exponent is right.
    return bitcast<f32>((u32(exponent) << 23u) + (rounded - 0x800000u));
}
