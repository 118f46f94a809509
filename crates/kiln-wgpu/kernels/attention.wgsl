// softmax(q · kᵀ / sqrt(head_dim)) · v without keeping scores: a workgroup takes 16·ROWS queries of one head and goes through the
// keys in blocks of 32, with a running maximum and sum of each row.
//
// An invocation has ROWS queries and two keys of a block, and then ROWS queries and two columns of each of SLICES slices of 32
// columns of the result. Heads are padded to whole slices with zeros.
//
// mask: 0 none; 1 causal, keys before `mask_end`; 2 isolated, the rows from `mask_start` to `mask_end`.
#params queries, keys, head_dim, heads, kv_heads, first_query, scale: f32, mask, mask_start, mask_end
#read q: T
#read k: T
#read v: T
#write y: T
#include math

const QUERIES = 16u * ROWS;
const MASKED = -1e30;

// The scores of a block of keys, then their exponentials.
var<workgroup> scores: array<f32, QUERIES * 33u>;
// A slice of 16 columns of queries and one of keys; later one of 32 columns of values.
var<workgroup> tile: array<f32, max((QUERIES + 32u) * 17u, 32u * 33u)>;
var<workgroup> row_max: array<f32, QUERIES>;
var<workgroup> row_sum: array<f32, QUERIES>;
var<workgroup> row_factor: array<f32, QUERIES>;

fn attends(query: u32, key: u32) -> bool {
    if (params.mask == 1u) {
        return key <= query && key < params.mask_end;
    }
    if (params.mask == 2u && query >= params.mask_start && query < params.mask_end) {
        return key >= params.mask_start && key < params.mask_end;
    }
    return true;
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let tiles = (params.queries + QUERIES - 1u) / QUERIES;
    let number = group.x + group.y * 32768u;
    let head = number / tiles;
    if (head >= params.heads) {
        return;
    }
    let first_row = number % tiles * QUERIES;
    let kv_head = head / (params.heads / params.kv_heads);
    let q_stride = params.heads * params.head_dim;
    let kv_stride = params.kv_heads * params.head_dim;
    let lane_row = lane / 16u * ROWS;
    let lane_key = lane % 16u * 2u;
    if (lane < QUERIES) {
        row_max[lane] = MASKED;
        row_sum[lane] = 0.0;
    }
    #for i in 0..ROWS
    #for s in 0..SLICES
    var out_{s}_{i} = vec2<f32>();
    #end
    #end
    var end = params.keys;
    if (params.mask == 1u) {
        end = min(params.mask_end, params.first_query + min(first_row + QUERIES, params.queries));
    }
    for (var first_key = 0u; first_key < end; first_key += 32u) {
        #for i in 0..ROWS
        var score_{i} = vec2<f32>();
        #end
        for (var column = 0u; column < params.head_dim; column += 16u) {
            workgroupBarrier();
            for (var at = lane; at < (QUERIES + 32u) * 16u; at += 256u) {
                let row = at / 16u;
                let c = column + at % 16u;
                var value = 0.0;
                if (c < params.head_dim) {
                    if (row < QUERIES) {
                        if (first_row + row < params.queries) {
                            value = read_q((first_row + row) * q_stride + head * params.head_dim + c);
                        }
                    } else if (first_key + row - QUERIES < params.keys) {
                        value = read_k((first_key + row - QUERIES) * kv_stride + kv_head * params.head_dim + c);
                    }
                }
                tile[row * 17u + at % 16u] = value;
            }
            workgroupBarrier();
            for (var c = 0u; c < 16u; c++) {
                let keys = vec2<f32>(tile[(QUERIES + lane_key) * 17u + c], tile[(QUERIES + lane_key) * 17u + 17u + c]);
                #for i in 0..ROWS
                score_{i} += tile[(lane_row + {i}u) * 17u + c] * keys;
                #end
            }
        }
        #for i in 0..ROWS
        for (var j = 0u; j < 2u; j++) {
            let key = first_key + lane_key + j;
            var score = MASKED;
            if (key < params.keys && attends(params.first_query + first_row + lane_row + {i}u, key)) {
                score = score_{i}[j] * params.scale;
            }
            score_{i}[j] = score;
            scores[(lane_row + {i}u) * 33u + lane_key + j] = score;
        }
        #end
        workgroupBarrier();
        if (lane < QUERIES) {
            var most = row_max[lane];
            for (var key = 0u; key < 32u; key++) {
                most = max(most, scores[lane * 33u + key]);
            }
            row_factor[lane] = exact_exp(row_max[lane] - most);
            row_max[lane] = most;
        }
        workgroupBarrier();
        #for i in 0..ROWS
        for (var j = 0u; j < 2u; j++) {
            var weight = 0.0;
            if (score_{i}[j] > MASKED) {
                weight = exact_exp(score_{i}[j] - row_max[lane_row + {i}u]);
            }
            scores[(lane_row + {i}u) * 33u + lane_key + j] = weight;
        }
        #end
        workgroupBarrier();
        if (lane < QUERIES) {
            var sum = row_sum[lane] * row_factor[lane];
            for (var key = 0u; key < 32u; key++) {
                sum += scores[lane * 33u + key];
            }
            row_sum[lane] = sum;
        }
        #for i in 0..ROWS
        let factor_{i} = row_factor[lane_row + {i}u];
        #end
        #for s in 0..SLICES
        {
            // The tile still has keys, or the slice before.
            workgroupBarrier();
            for (var at = lane; at < 1024u; at += 256u) {
                let c = {s}u * 32u + at % 32u;
                let key = first_key + at / 32u;
                var value = 0.0;
                if (c < params.head_dim && key < params.keys) {
                    value = read_v(key * kv_stride + kv_head * params.head_dim + c);
                }
                tile[at / 32u * 33u + at % 32u] = value;
            }
            workgroupBarrier();
            #for i in 0..ROWS
            out_{s}_{i} *= factor_{i};
            #end
            for (var key = 0u; key < 32u; key++) {
                let values = vec2<f32>(tile[key * 33u + lane_key], tile[key * 33u + lane_key + 1u]);
                #for i in 0..ROWS
                out_{s}_{i} += scores[(lane_row + {i}u) * 33u + key] * values;
                #end
            }
        }
        #end
    }
    workgroupBarrier();
    #for i in 0..ROWS
    if (first_row + lane_row + {i}u < params.queries) {
        let at = (first_row + lane_row + {i}u) * q_stride + head * params.head_dim;
        let sum = row_sum[lane_row + {i}u];
        #for s in 0..SLICES
        if ({s}u * 32u + lane_key < params.head_dim) {
            let count = min(2u, params.head_dim - {s}u * 32u - lane_key);
            write2_y(at + {s}u * 32u + lane_key, out_{s}_{i} / sum, count);
        }
        #end
    }
    #end
}
