// gRPC's health check, which kubefan serves without credentials.

import { create, createFileRegistry, type DescMethodUnary } from "@bufbuild/protobuf";
import {
  FieldDescriptorProto_Label,
  FieldDescriptorProto_Type,
  FileDescriptorProtoSchema,
} from "@bufbuild/protobuf/wkt";
import type { Transport } from "@connectrpc/connect";

/** `SERVING` of `HealthCheckResponse`. */
const SERVING = 1;

// Two small messages. Generated code would be a package of its own.
const file = create(FileDescriptorProtoSchema, {
  name: "grpc/health/v1/health.proto",
  package: "grpc.health.v1",
  syntax: "proto3",
  messageType: [
    { name: "HealthCheckRequest" },
    {
      name: "HealthCheckResponse",
      field: [
        {
          name: "status",
          jsonName: "status",
          number: 1,
          // An enum, which is a number on the wire.
          type: FieldDescriptorProto_Type.INT32,
          label: FieldDescriptorProto_Label.OPTIONAL,
        },
      ],
    },
  ],
  service: [
    {
      name: "Health",
      method: [
        {
          name: "Check",
          inputType: ".grpc.health.v1.HealthCheckRequest",
          outputType: ".grpc.health.v1.HealthCheckResponse",
        },
      ],
    },
  ],
});

/** Whether the server says that it serves. */
export async function isServing(
  transport: Transport,
  headers: Record<string, string>,
  limitMs: number,
): Promise<boolean> {
  const service = createFileRegistry(file, () => undefined).getService("grpc.health.v1.Health");
  const check = service?.method["check"];
  if (check === undefined) {
    return false;
  }
  try {
    const method = check as DescMethodUnary;
    const answer = await transport.unary(method, undefined, limitMs, headers, {});
    return "status" in answer.message && answer.message["status"] === SERVING;
  } catch {
    return false;
  }
}
