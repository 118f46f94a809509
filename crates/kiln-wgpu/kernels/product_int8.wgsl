// The product of int8 matrices, with an epilogue: as `product`, with four integers to a word and exact sums.
#let BK 16
#params rows, inner, outputs, stride, first_column, all_columns, y_stride, y_column, flags, scale: f32
#read x: words
#read w: words
#read columns: f32
#read row_scales: f32
#read gate: f32
#read residual: Y
#write y: Y
#include epilogue

const BM = 16u * TM;
const BN = 64u;

var<workgroup> x_tile: array<u32, BM * BK>;
var<workgroup> w_tile: array<u32, BN * BK>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let tiles = (params.rows + BM - 1u) / BM;
    let number = group.x + group.y * 32768u;
    let first_m = number % tiles * BM;
    let first_n = number / tiles * BN;
    if (first_n >= params.outputs) {
        return;
    }
    let lane_m = lane / 16u * TM;
    let lane_n = lane % 16u * 4u;
    let load_row = lane / 4u;
    let load_k = lane % 4u * 4u;
    #for i in 0..TM
    var sums_{i} = vec4<i32>();
    #end
    for (var start = 0u; start < params.inner; start += BK) {
        workgroupBarrier();
        #for c in 0..4
        {
            let k = start + load_k + {c}u;
            if (load_row < BM) {
                var word = 0u;
                if (first_m + load_row < params.rows && k < params.inner) {
                    word = word_x((first_m + load_row) * params.inner + k);
                }
                x_tile[(load_k + {c}u) * BM + load_row] = word;
            }
            var weight = 0u;
            if (first_n + load_row < params.outputs && k < params.inner) {
                weight = word_w((first_n + load_row) * params.stride + k);
            }
            w_tile[(load_k + {c}u) * BN + load_row] = weight;
        }
        #end
        workgroupBarrier();
        for (var inner = 0u; inner < BK; inner++) {
            let at = inner * BN + lane_n;
            #for j in 0..4
            let w_{j} = w_tile[at + {j}u];
            #end
            #for i in 0..TM
            let x_{i} = x_tile[inner * BM + lane_m + {i}u];
            sums_{i} += vec4<i32>(
                dot4I8Packed(x_{i}, w_0),
                dot4I8Packed(x_{i}, w_1),
                dot4I8Packed(x_{i}, w_2),
                dot4I8Packed(x_{i}, w_3),
            );
            #end
        }
    }
    #for i in 0..TM
    finish2(first_m + lane_m + {i}u, first_n + lane_n, vec2<f32>(sums_{i}.xy));
    finish2(first_m + lane_m + {i}u, first_n + lane_n + 2u, vec2<f32>(sums_{i}.zw));
    #end
}
