import com.google.gson.JsonArray;
import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import com.google.gson.reflect.TypeToken;
import io.kubernetes.client.openapi.ApiClient;
import io.kubernetes.client.openapi.apis.CoreV1Api;
import io.kubernetes.client.openapi.models.V1ConfigMap;
import io.kubernetes.client.util.Config;
import io.kubernetes.client.util.Watch;
import java.io.FileInputStream;
import java.security.MessageDigest;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HexFormat;
import java.util.List;
import java.util.Map;
import okhttp3.Call;
import okhttp3.OkHttpClient;
import okhttp3.Request;
import okhttp3.Response;
import okio.BufferedSource;

/**
 * Lists and watches ConfigMaps with OkHttp and with the official client, all at the same time, and
 * prints each report as a line of JSON. The argument is JSON: the CA's file, a token, and the reads.
 */
class Decode {
  public static void main(String[] args) throws Exception {
    JsonObject task = JsonParser.parseString(args[0]).getAsJsonObject();
    List<Thread> threads = new ArrayList<>();
    for (JsonElement each : task.getAsJsonArray("reads")) {
      JsonObject read = each.getAsJsonObject();
      Thread thread = new Thread(() -> follow(task, read));
      threads.add(thread);
      thread.start();
    }
    for (Thread thread : threads) {
      thread.join();
    }
    // The threads of OkHttp's connections would run on for a minute.
    System.exit(0);
  }

  private static void follow(JsonObject task, JsonObject read) {
    try {
      boolean isOkHttp = read.get("decoder").getAsString().equals("OkHttp");
      ApiClient client = client(task, read);
      if (isOkHttp) {
        overOkHttp(client.getHttpClient(), task, read);
      } else {
        overClient(client, read);
      }
      report(read, Map.of("end", "clean"));
    } catch (Throwable error) {
      report(read, Map.of("end", "error", "error", error + "; " + error.getCause()));
    }
  }

  /** A client as its examples of watches have it: without a time limit of reads. */
  private static ApiClient client(JsonObject task, JsonObject read) throws Exception {
    String server = read.get("server").getAsString();
    ApiClient client = Config.fromToken(server, task.get("token").getAsString());
    try (FileInputStream ca = new FileInputStream(task.get("ca_file").getAsString())) {
      client.setSslCaCert(ca);
    }
    client.setHttpClient(client.getHttpClient().newBuilder().readTimeout(Duration.ZERO).build());
    return client;
  }

  private static void overOkHttp(OkHttpClient http, JsonObject task, JsonObject read) throws Exception {
    Request request = new Request.Builder()
        .url(read.get("url").getAsString())
        .header("Authorization", "Bearer " + task.get("token").getAsString())
        .build();
    try (Response response = http.newCall(request).execute()) {
      BufferedSource source = response.body().source();
      for (String line = source.readUtf8Line(); line != null; line = source.readUtf8Line()) {
        JsonObject value = JsonParser.parseString(line).getAsJsonObject();
        if (read.get("is_list").getAsBoolean()) {
          JsonArray items = value.getAsJsonArray("items");
          for (JsonElement item : items) {
            report(read, "ITEM", V1ConfigMap.fromJson(item.toString()));
          }
        } else {
          V1ConfigMap object = V1ConfigMap.fromJson(value.get("object").toString());
          report(read, value.get("type").getAsString(), object);
        }
      }
    }
  }

  private static void overClient(ApiClient client, JsonObject read) throws Exception {
    CoreV1Api api = new CoreV1Api(client);
    String namespace = read.get("namespace").getAsString();
    String version = read.get("version").getAsString();
    if (read.get("is_list").getAsBoolean()) {
      for (V1ConfigMap item : api.listNamespacedConfigMap(namespace).resourceVersion(version).execute().getItems()) {
        report(read, "ITEM", item);
      }
      return;
    }
    int seconds = read.get("seconds").getAsInt();
    Call call = api.listNamespacedConfigMap(namespace)
        .resourceVersion(version)
        .watch(true)
        .timeoutSeconds(seconds == 0 ? null : seconds)
        .buildCall(null);
    try (Watch<V1ConfigMap> watch =
        Watch.createWatch(client, call, new TypeToken<Watch.Response<V1ConfigMap>>() {}.getType())) {
      for (Watch.Response<V1ConfigMap> event : watch) {
        report(read, event.type, event.object);
      }
    }
  }

  private static void report(JsonObject read, String type, V1ConfigMap object) throws Exception {
    byte[] payload = object.getData().get("payload").getBytes("UTF-8");
    String digest = HexFormat.of().formatHex(MessageDigest.getInstance("SHA-256").digest(payload));
    String version = object.getMetadata().getResourceVersion();
    report(read, Map.of("type", type, "name", object.getMetadata().getName(), "version", version, "digest", digest));
  }

  private static synchronized void report(JsonObject read, Map<String, String> values) {
    JsonObject report = new JsonObject();
    report.add("decoder", read.get("decoder"));
    report.add("read", read.get("read"));
    values.forEach(report::addProperty);
    System.out.println(report);
  }
}
